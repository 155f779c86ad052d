"""Metrics in Prometheus' text format.

The ledger keeps its own counters, and `Health` keeps those of the work beside it. This module only renders both: a
value that two places counted could disagree.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)

from openclaw_rl.processes.supervisor import ChildStatus
from openclaw_rl.telemetry.health import Durations, Health

_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily, UnknownMetricFamily)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


MOST_FIGURES = 200
"""Series of one step: a trainer of another program chooses the names of its figures."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The newest step."""

    weight_version: int
    committed_at: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Training:
    step: StepFigures | None = None
    """None before the first step."""
    tracked: Mapping[str, int] = field(default_factory=dict)
    """The newest version that each tracker has taken."""


class EngineFigures(Protocol):
    """One engine of a pool."""

    @property
    def name(self) -> str: ...

    @property
    def is_in(self) -> bool: ...

    @property
    def is_drained(self) -> bool: ...

    @property
    def running(self) -> int: ...

    @property
    def sessions(self) -> int: ...

    @property
    def calls(self) -> int: ...

    @property
    def failures(self) -> int: ...


def render(
    counts: Mapping[str, int],
    weight_version: int,
    health: Health,
    problems: Sequence[str] = (),
    children: Sequence[ChildStatus] = (),
    practice: Mapping[str, float] = {},
    training: Training = Training(),
    engines: Sequence[EngineFigures] = (),
) -> str:
    """Return the answer to one scrape.

    counts: the ledger's; empty while the ledger cannot be read. problems: each begins with its part and a colon.
    practice: its figures; empty where the server never practises. engines: of a pool; empty for one engine.
    """
    # A registry for each scrape, and never the library's global one: several servers may run in one process.
    registry = CollectorRegistry()
    registry.register(_Scrape(counts, weight_version, health, problems, children, practice, training, engines))
    return generate_latest(registry).decode()


class _Scrape:
    """Collector of one scrape, in the sense of `prometheus_client`."""

    def __init__(
        self,
        counts: Mapping[str, int],
        weight_version: int,
        health: Health,
        problems: Sequence[str],
        children: Sequence[ChildStatus],
        practice: Mapping[str, float],
        training: Training,
        engines: Sequence[EngineFigures],
    ) -> None:
        self._counts, self._weight_version, self._health = counts, weight_version, health
        self._problems, self._children, self._practice = problems, children, practice
        self._training, self._engines = training, engines

    def collect(self) -> Iterator[Metric]:
        health = self._health
        yield GaugeMetricFamily(
            "openclaw_rl_weight_version", "The policy version that new requests get.", self._weight_version
        )
        yield _labelled(
            GaugeMetricFamily("openclaw_rl_ledger", "Rows of the ledger by their state or outcome.", labels=["what"]),
            self._counts,
        )
        yield _labelled(
            CounterMetricFamily(
                "openclaw_rl_scoring", "Judge and teacher calls by outcome, since the server started.", labels=["what"]
            ),
            health.counts,
        )
        # Dashboards of the first release read this name, and the library allows no counter without `_total`.
        yield _labelled(
            UnknownMetricFamily("openclaw_rl_scoring", "Former name of openclaw_rl_scoring_total.", labels=["what"]),
            health.counts,
        )
        yield _labelled(
            GaugeMetricFamily(
                "openclaw_rl_scoring_mean",
                "Means over scored turns since the server started, in nats per token.",
                labels=["what"],
            ),
            {what: mean.value for what, mean in health.means.items()},
        )
        yield _labelled(
            GaugeMetricFamily(
                "openclaw_rl_practice",
                "Practice: active wishes, open ones, the update being made, the mean learned part of the aim.",
                labels=["what"],
            ),
            self._practice,
        )
        yield _labelled(
            GaugeMetricFamily(
                "openclaw_rl_out_of_order", "Parts that fail now; no series while all parts work.", labels=["part"]
            ),
            dict.fromkeys((problem.partition(":")[0] for problem in self._problems), 1),
        )
        yield _labelled(
            CounterMetricFamily(
                "openclaw_rl_failures", "Failed calls of a part, since the server started.", labels=["part"]
            ),
            health.failures,
        )
        yield _labelled(
            CounterMetricFamily(
                "openclaw_rl_restarts", "Restarts of the server's child processes, after they ended.", labels=["part"]
            ),
            {child.name: child.restarts for child in self._children},
        )
        yield from self._pool()
        yield from self._steps()
        yield _histogram(
            "time_to_first_token", "From the arrival of a chat request to its first token.", health.first_token
        )
        yield _histogram("step", "Training steps, as their trainer measured them.", health.step)
        yield _histogram("push", "Transfers of one version's weights to the engine, adapters included.", health.push)
        yield _histogram("gate", "The publisher's gate: KL and canaries of one version.", health.gate)

    def _pool(self) -> Iterator[Metric]:
        """Yield the state of each engine of a pool; of one engine alone, families without a value."""

        def gauge(name: str, meaning: str, values: Mapping[str, float]) -> Metric:
            return _labelled(GaugeMetricFamily(f"openclaw_rl_engine_{name}", meaning, labels=["engine"]), values)

        def counter(name: str, meaning: str, values: Mapping[str, float]) -> Metric:
            return _labelled(CounterMetricFamily(f"openclaw_rl_engine_{name}", meaning, labels=["engine"]), values)

        engines = {engine.name: engine for engine in self._engines}
        yield gauge("up", "1 for an engine of the pool that gets requests.", {n: e.is_in for n, e in engines.items()})
        yield gauge("drained", "1 for one that the operator drained.", {n: e.is_drained for n, e in engines.items()})
        yield gauge("running", "Calls on an engine now.", {n: e.running for n, e in engines.items()})
        yield gauge(
            "sessions", "Conversations whose prefix an engine holds.", {n: e.sessions for n, e in engines.items()}
        )
        yield counter("calls", "Calls to an engine since the start.", {n: e.calls for n, e in engines.items()})
        yield counter("failed_calls", "Those that failed.", {n: e.failures for n, e in engines.items()})

    def _steps(self) -> Iterator[Metric]:
        step = self._training.step
        figures = {} if step is None else {name: v for name, v in step.figures.items() if math.isfinite(v)}
        yield _labelled(
            GaugeMetricFamily(
                "openclaw_rl_step", "Figures of the newest committed step, by the ledger's names.", labels=["figure"]
            ),
            dict(sorted(figures.items())[:MOST_FIGURES]),
        )
        yield GaugeMetricFamily(
            "openclaw_rl_step_version",
            "The newest committed version, whether it serves or not.",
            0 if step is None else step.weight_version,
        )
        yield GaugeMetricFamily(
            "openclaw_rl_step_committed_timestamp_seconds",
            "Time of the newest commit, in seconds since 1970; 0 before the first.",
            0 if step is None else step.committed_at,
        )
        yield _labelled(
            GaugeMetricFamily(
                "openclaw_rl_tracked_version", "The newest version that a tracker has taken.", labels=["tracker"]
            ),
            self._training.tracked,
        )


def _labelled(family: _Family, values: Mapping[str, float]) -> _Family:
    for label, value in sorted(values.items()):
        family.add_metric([label], value)
    return family


def _histogram(name: str, meaning: str, durations: Durations) -> HistogramMetricFamily:
    return HistogramMetricFamily(
        f"openclaw_rl_{name}_seconds", f"{meaning} In seconds.", durations.cumulative(), durations.total_s
    )

"""Counters, means and durations of the work beside the ledger, and the parts of the server that fail now.

The server makes one `Health` at its start and hands it to every part that counts; `/metrics` and `/healthz` read it.
It starts empty with each server, because the ledger is the memory. It belongs to the event loop: no lock.

A part is out of order after `OUT_AFTER` failures in a row. The log then gets one line, however many requests meet the
failure, and one more line when the part works again. The callers log each single call.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic

import structlog

from openclaw_rl.messages import whole_characters

log = structlog.get_logger()

_MOST_WORDS = 2000
"""Characters of a failure's words that are kept."""
OUT_AFTER = 3  # not 1: a retry mends a single failed call
FIRST_TOKENS = 1000
"""Chats whose time to the first token is kept."""
SHARE_OF, LEAST_OF = 50, 10
"""Newest answers of a part that a share is taken of, and the least number of them."""

FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STEP_BUCKETS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
PUSH_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GATE_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(slots=True)
class Mean:
    total: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


class Durations:
    """Histogram of durations in seconds, by upper bound."""

    # `prometheus_client.Histogram` would take a lock twice and cost 7 µs a call; this one costs 0.4 µs.
    __slots__ = ("_bounds", "_counts", "total_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: rising, in seconds; a longer duration counts in the last bucket, which has no bound."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Return, for each upper bound, the number of durations up to it; the last bound is `+Inf`."""
        names = [*map(str, self._bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self._counts), strict=True)]


@dataclass(slots=True)
class _Failing:
    since: float
    times: int = 0
    error: str = ""
    is_failing: bool = False

    def __str__(self) -> str:
        return f"failed {'once' if self.times == 1 else f'{self.times} times in a row, last'}: {self.error}"


class Health:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.means: dict[str, Mean] = {}
        self.first_token = Durations(FIRST_TOKEN_BUCKETS_S)
        self.step = Durations(STEP_BUCKETS_S)
        self.push = Durations(PUSH_BUCKETS_S)
        self.gate = Durations(GATE_BUCKETS_S)
        self.first_tokens: deque[tuple[float, int, float]] = deque(maxlen=FIRST_TOKENS)
        """(time, version, seconds to the first token) of the newest chats, oldest first."""
        self._failing: dict[str, _Failing] = {}
        self._failures: Counter[str] = Counter()
        self._answers: dict[str, deque[bool]] = {}

    def count(self, name: str) -> None:
        self.counts[name] += 1

    def observe(self, name: str, value: float) -> None:
        mean = self.means.setdefault(name, Mean())
        mean.total += value
        mean.count += 1

    def first_token_came(self, at: float, weight_version: int, seconds: float) -> None:
        self.first_token.observe(seconds)
        self.first_tokens.append((at, weight_version, seconds))

    def ok(self, part: str) -> None:
        """Count the part as working; its failures in a row start again at zero."""
        if not self._failing:
            return
        failing = self._failing.pop(part, None)
        if failing is not None and failing.is_failing:
            log.info("part_works_again", part=part, failures=failing.times, for_s=round(monotonic() - failing.since, 1))

    def failed(self, part: str, error: str, *, at_once: bool = False) -> None:
        """Count a failure of the part. at_once: this single failure puts the part out of order."""
        self._failures[part] += 1
        failing = self._failing.setdefault(part, _Failing(monotonic()))
        error = whole_characters(error[:_MOST_WORDS])
        failing.times, failing.error = failing.times + 1, error
        if not failing.is_failing and (at_once or failing.times >= OUT_AFTER):
            failing.is_failing = True
            log.warning("part_fails", part=part, failures=failing.times, error=error)

    def answered(self, part: str, *, is_bad: bool, limit: float, error: str) -> None:
        """Count an answer of the part, which is out of order while more than `limit` of its newest answers are bad.

        error: words about the bad answers, behind their number.
        """
        answers = self._answers.setdefault(part, deque(maxlen=SHARE_OF))
        answers.append(is_bad)
        bad, of = sum(answers), len(answers)
        if of < LEAST_OF or bad <= limit * of:
            self.ok(part)
        elif is_bad or not self.is_failing(part):
            self.failed(part, f"{bad} of the last {of} {error}", at_once=True)

    def is_failing(self, part: str) -> bool:
        failing = self._failing.get(part)
        return failing is not None and failing.is_failing

    @property
    def failures(self) -> dict[str, int]:
        """Failures of each part since the start."""
        return dict(self._failures)

    def problems(self) -> list[str]:
        """Return one sentence for each part that is out of order."""
        return [f"{part}: {failing}" for part, failing in sorted(self._failing.items()) if failing.is_failing]

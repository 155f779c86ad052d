"""Figures of one training step, as the ledger keeps them with the version that the step made."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class StepProbe:
    """One reply of the batch under the new weights in the trainer: the publisher's self-test compares the engine."""

    prompt_ids: tuple[int, ...]  # [P]; empty where its session was forgotten
    response_ids: tuple[int, ...]  # [T]; empty where its session was forgotten
    log_probs: tuple[float, ...]  # [T], at temperature 1
    parent_log_probs: tuple[float, ...]  # [T], at temperature 1, before the step

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        return cls(
            tuple(table["prompt_ids"]),
            tuple(table["response_ids"]),
            tuple(table["log_probs"]),
            tuple(table["parent_log_probs"]),
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Flat finite numbers for logs, `/healthz` and plots."""
    probes: tuple[StepProbe, ...] = ()

    @classmethod
    def of_json(cls, metrics: str, probes: str | bytes = "[]") -> Self:
        """Parse the ledger's two columns."""
        return cls(json.loads(metrics), tuple(map(StepProbe.of, json.loads(probes))))

    def to_json(self) -> str:
        return json.dumps({"metrics": dict(self.metrics), "probes": [asdict(probe) for probe in self.probes]})

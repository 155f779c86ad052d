"""Versions of the policy, and the figures of the step that made each."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from openclaw_rl.types.turns import SHARED_POLICY


class VersionState(StrEnum):
    CANDIDATE = "candidate"
    GATED = "gated"
    LOADING = "loading"
    SERVING = "serving"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    SUPERSEDED = "superseded"
    LOST = "lost"


class WeightKind(StrEnum):
    LORA = "lora"
    FULL = "full"


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


@dataclass(frozen=True, slots=True)
class Version:
    """One row of the ledger's `versions`: weights that a trainer committed. 0 is the base."""

    weight_version: int
    parent: int | None
    kind: WeightKind
    base_hash: str
    folder: str | None
    """Relative to the data directory; None for the base."""
    sha256: str | None
    """Hash of the weights file."""
    state: VersionState
    lease_id: str | None = None
    durable: bool = True
    committed_at: float = 0.0
    report: StepReport = field(default_factory=StepReport)
    reason: str | None = None
    """The reason that it was rejected, rolled back or lost."""
    weights_file: str | None = None
    """File in `folder` with the hash `sha256`."""
    same_weights_as: int | None = None
    """Number of an older version with the same weights, if no step made this one but a loss of later versions, or the
    start of a policy."""
    policy: str = SHARED_POLICY

    @property
    def is_base(self) -> bool:
        """True for the base's own weights: version 0, and the root of a policy that starts from it."""
        return self.kind is WeightKind.LORA and self.parent is None and self.weights_file is None

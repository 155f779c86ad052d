"""What the trainer loop drives: a learner that can load a version, step on samples, and write what it became."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from openclaw_rl.errors import TrainerError
from openclaw_rl.trainer_protocol import Probe
from openclaw_rl.types import DropReason, Sample, WeightKind


class Interrupted(TrainerError):
    """A step was broken off on purpose: the process is asked to stop, or its lease is over."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step was done; the learner now holds the new weights."""

    metrics: Mapping[str, float]
    drop: Mapping[str, DropReason] = field(default_factory=dict)
    """Leased samples that the step left out, for good."""
    probes: tuple[Probe, ...] = ()


@dataclass(frozen=True, slots=True)
class NoStep:
    """No step could be made of these samples; what is not in `drop` waits again."""

    reason: str
    drop: Mapping[str, DropReason] = field(default_factory=dict)


class Learner(Protocol):
    kind: WeightKind
    base_hash: str

    def load(self, folder: Path | None, *, fresh_moments: bool) -> None:
        """Hold the version of this folder (None: the base). Raises TrainerError when it is torn or of another shape."""
        ...

    def step(self, samples: Sequence[Sample], between: Callable[[], None]) -> Step | NoStep:
        """One optimizer step. `between` is called often and may raise `Interrupted`, which passes through. After a
        `NoStep` or any error the learner must be loaded again."""
        ...

    def write(self, folder: Path) -> str:
        """Write all that `load` needs; the name of the weights file."""
        ...

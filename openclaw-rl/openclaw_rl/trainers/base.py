"""The learner protocol: the trainer loop drives a learner that loads a version, steps on samples and writes itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from openclaw_rl.errors import TrainerError
from openclaw_rl.trainer_protocol import Probe
from openclaw_rl.types import DropReason, Sample, WeightKind


class Interrupted(TrainerError):
    """A step was broken off on purpose: the process is asked to stop, or the tip moved."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step was made; the learner now holds the new weights."""

    metrics: Mapping[str, float]
    drop: Mapping[str, DropReason] = field(default_factory=dict)
    """Leased samples that the step left out; they are dropped."""
    probes: tuple[Probe, ...] = ()


@dataclass(frozen=True, slots=True)
class NoStep:
    """No step could be made of these samples; those not in `drop` wait again."""

    reason: str
    drop: Mapping[str, DropReason] = field(default_factory=dict)


class Learner(Protocol):
    """A policy with its optimizer, as the loop uses it."""

    kind: WeightKind
    base_hash: str

    def load(self, folder: Path | None, *, fresh_moments: bool) -> None:
        """Load the version of this folder (None: the base). Raises TrainerError when it is torn or of another shape."""
        ...

    def step(self, samples: Sequence[Sample], between: Callable[[], None], parent: int | None = None) -> Step | NoStep:
        """Make one optimizer step. parent: the number of the version that the learner holds.

        Calls `between` often; an exception that it raises passes through. After a `NoStep` or any error the learner
        must be loaded again.
        """
        ...

    def write(self, folder: Path) -> str:
        """Write all that `load` needs. Return the name of the weights file."""
        ...

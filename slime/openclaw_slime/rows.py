"""One sample of a step on the ranks of Megatron, and the figures that the loss finds for it.

A micro-batch of slime holds a fixed list of keys, and passes on the very objects of its `advantages` list. So a row is
attached to its advantages tensor (`ride`, `row_of`). No key of slime's gets another meaning, no second table is kept,
and all of a sample's terms reach the loss, a top-k too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from openclaw_rl.errors import TrainerError
from openclaw_rl.methods.base import Tally
from openclaw_rl.types import Sample
from openclaw_slime.outcome import RankShare
from openclaw_slime.rollout import Extras


@dataclass(slots=True)
class Row:
    """A sample with its credit, and the figures of this rank."""

    sample: Sample
    credit: tuple[float, ...]  # [T]
    is_filler: bool = False
    parent: int | None = None
    """The version trained from."""
    loss: float = 0.0
    """This rank's part of the sample's mean over its trained tokens."""
    trained_tokens: int = 0
    tallies: dict[str, Tally] = field(default_factory=dict)
    is_finite: bool = True

    @classmethod
    def of(cls, text: str) -> "Row":
        extras = Extras.model_validate_json(text)
        return cls(extras.sample.to_sample(), tuple(extras.advantages), extras.is_filler, extras.parent)

    @property
    def is_fresh(self) -> list[bool]:
        """[T]: True for trained tokens that the parent version sampled."""
        return self.sample.sampled_by(self.parent)


def ride(tensor: Tensor, row: Row) -> Tensor:
    """Attach the row to the tensor."""
    tensor.openclaw_row = row  # type: ignore[attr-defined]
    return tensor


def row_of(tensor: Tensor) -> Row:
    """Return the attached row. Raises TrainerError if slime made another tensor."""
    row = getattr(tensor, "openclaw_row", None)
    if not isinstance(row, Row):
        raise TrainerError("slime made other tensors of our advantages: it is not the pinned one")
    return row


def share_of(rows: Sequence[Row], *, stepped: bool, counts: bool, is_lease_over: bool = False) -> RankShare:
    """Sum one rank's rows for the driver."""
    tallies: dict[str, tuple[float, float]] = {}
    for row in rows:
        for name, (total, over) in row.tallies.items():
            before = tallies.get(name, (0.0, 0.0))
            tallies[name] = (before[0] + total, before[1] + over)
    return RankShare(
        stepped,
        counts,
        loss=math.fsum(row.loss for row in rows),
        trained_tokens=sum(row.trained_tokens for row in rows),
        tallies=tallies,
        not_finite=tuple(row.sample.sample_id for row in rows if not row.is_finite),
        is_lease_over=is_lease_over,
    )

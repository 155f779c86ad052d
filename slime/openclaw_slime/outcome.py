"""Outcome of a step, merged from the shares of Megatron's ranks. No torch: the driver imports it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openclaw_rl.errors import TrainerError
from openclaw_rl.methods.base import Tally

LONGEST_REASON = 300
"""Characters of a reason that the server takes."""


class LeftOut(TrainerError):
    """The lease was over before the step began: no weight has changed."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """One worker's figures of a step, sent over Ray."""

    stepped: bool
    """True if the optimizer stepped; False if a gradient was not finite, or the lease over."""
    counts: bool
    """False on ranks that repeat another rank's numbers (tensor parallelism) or run no loss (earlier stages)."""
    loss: float = 0.0
    """Σ over its samples of their parts of the mean over trained tokens, weighted n/G as slime's divisors are."""
    trained_tokens: int = 0
    tallies: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    """Sample ids."""
    is_lease_over: bool = False
    """True if the step was left out because its lease ended while it was computed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's figures over all ranks."""

    stepped: bool
    metrics: Mapping[str, float]
    not_finite: tuple[str, ...]
    is_lease_over: bool = False


def merged(shares: Sequence[RankShare], *, samples: int, batch_size: int) -> Outcome:
    """Merge the ranks' shares; `samples` of `batch_size` rows were real.

    Raises ValueError if some ranks stepped and some did not.
    """
    if len({share.stepped for share in shares}) != 1:
        raise ValueError("some ranks stepped and some did not")
    seen = [share for share in shares if share.counts]
    tallies: dict[str, Tally] = {}
    for share in seen:
        for name, (total, over) in share.tallies.items():
            before = tallies.get(name, Tally(0.0, 0.0))
            tallies[name] = Tally(before.total + total, before.over + over)
    metrics = {
        "loss": math.fsum(share.loss for share in seen) / batch_size,
        "samples": float(samples),
        "fillers": float(batch_size - samples),
        "trained_tokens": float(sum(share.trained_tokens for share in seen)),
    }
    metrics |= {name: tally.total / tally.over for name, tally in tallies.items() if tally.over}
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    not_finite = tuple(sorted({name for share in seen for name in share.not_finite}))
    return Outcome(shares[0].stepped, finite, not_finite, any(share.is_lease_over for share in shares))


def reason_of(error: Exception, before: str = "") -> str:
    """Return an exception in words that fit the server's limit."""
    return f"{before}{type(error).__name__}: {error}"[:LONGEST_REASON]

"""Stop rules of practice: when a wish is learned, when more practice is no use, and when practice does harm.

A wish *rests* when it needs no more practice of its own: it is learned, it had its updates, or it makes no progress. It
is rehearsed all the same while another wish is practised, for what is not rehearsed is forgotten. A wish is *stopped*
when its replies are too far from the base: nothing rehearses it any more.

Progress is that of all open wishes together. One meaning in several words is several wishes, which are learned at
unlike speeds: practice that went on for the slowest unlearned the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from openclaw_rl.settings import PracticeSettings
from openclaw_rl.types import Wish

LEARNED = "learned"
FALLS_BELOW = 0.85
"""A learned wish needs practice again when its share, or what the judge passes, falls below this part of the aim."""
_PROGRESS = 0.01
"""Least rise of the mean learned share that counts as progress, as a part of the aim, for each update. Practice that
goes on where the share rises more slowly unlearns (README of benchmarks)."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """Consequence of a measure. Without both reasons the wish is practised on."""

    rests: str | None = None
    stopped: str | None = None


def rule(
    wish: Wish,
    share: float | None,
    kl: float | None,
    settings: PracticeSettings,
    *,
    aim: float,
    stalls: bool = False,
    passed: float | None = None,
) -> Ruling:
    """Return what follows for a wish.

    aim: the share at which it is learned. stalls: the open wishes make no progress (`no_progress`).
    passed: the part of its newest practice replies that a judge passed; None without one. The share compares the
    policy with the hinted base, and the judge reads what the policy says: both must hold.
    """
    if kl is not None and kl > settings.max_kl:
        return Ruling(stopped=f"its replies are {kl:.2f} nats a token from the base (practice.max_kl)")
    if wish.rests is not None and wish.rests != LEARNED:
        return Ruling(rests=wish.rests)
    level = 1.0 if wish.rests is None else FALLS_BELOW
    is_passed = passed is None or passed >= level * settings.stop_passed
    if share is not None and share >= level * aim and is_passed:
        return Ruling(rests=LEARNED)
    if wish.updates >= settings.max_updates:
        return Ruling(rests=f"it had {wish.updates} updates (practice.max_updates)")
    if stalls:
        return Ruling(rests=f"no progress in {settings.patience} updates (practice.patience)")
    return Ruling()


def no_progress(histories: Sequence[Sequence[float]], settings: PracticeSettings, *, aim: float) -> bool:
    """Return True if the mean share of the open wishes rises no more.

    histories: the shares of each wish so far in this process, one a version, the newest last.
    """
    length = min(map(len, histories), default=0)
    means = [fmean(shares) for shares in zip(*(history[len(history) - length :] for history in histories), strict=True)]
    before, newest = means[: -settings.patience], means[-settings.patience :]
    return bool(before) and max(newest) < max(before) + _PROGRESS * settings.patience * aim

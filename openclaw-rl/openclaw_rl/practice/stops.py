"""Stop rules of practice: when a wish is learned, when more practice is no use, and when practice does harm.

A wish *rests* when it needs no more practice of its own: it is learned, it had its updates, or it makes no progress. It
is rehearsed all the same while another wish is practised, for what is not rehearsed is forgotten. A wish is *stopped*
when its replies are too far from the base: nothing rehearses it any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.settings import PracticeSettings
from openclaw_rl.types import Wish

LEARNED = "learned"
FALLS_BELOW = 0.85
"""A learned wish needs practice again when its share, or what the judge passes, falls below this part of the aim."""
_PROGRESS = 0.04
"""Least rise of the learned share that counts as progress, as a part of the aim. Practice that goes on where the share
rises more slowly unlearns: .85 of new replies were as wished after 16 updates, .60 after 29 (README of benchmarks)."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """Consequence of a measure. Without both reasons the wish is practised on."""

    rests: str | None = None
    stopped: str | None = None


def rule(
    wish: Wish,
    share: float | None,
    kl: float | None,
    history: Sequence[float],
    settings: PracticeSettings,
    *,
    aim: float,
    passed: float | None = None,
) -> Ruling:
    """Return what follows for a wish.

    history: its shares so far in this process, `share` among them. aim: the share at which it is learned.
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
    before, newest = history[: -settings.patience], history[-settings.patience :]
    if before and max(newest) < max(before) + _PROGRESS * aim:
        return Ruling(rests=f"no progress in {settings.patience} updates (practice.patience)")
    return Ruling()

"""Learned share of a wish (`openclaw_rl.practice.share`) by plain batched forwards.

Two replies to each of a few prompts are fixed beforehand: one of the base, one of the base that reads the hint.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.learning.fleet import Reply
from benchmarks.learning.subject import forced_log_probs
from openclaw_rl.practice.share import Forced, learned_share, moved_once
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Ids

_Pairs = Sequence[tuple[Ids, Ids]]


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Fixed texts, and the hint's effect on them."""

    pairs: _Pairs
    """(prompt without the hint, reply)."""
    base: tuple[float, ...]
    hinted: tuple[float, ...]

    def share(self, policy: LoraPolicy) -> float:
        found = learned_share([Forced(_flat(policy, self.pairs), self.base, self.hinted)])
        return 0.0 if found is None else found


def yardstick(
    policy: LoraPolicy,
    prompts: Sequence[tuple[Ids, Ids]],
    replies: Sequence[Reply],
    hinted_replies: Sequence[Reply],
    neutral: Sequence[Ids] | None = None,
    weight: float = 0.0,
) -> Yardstick:
    """Return the yardstick of these prompts, each (plain, with the hint), and of their two replies.

    neutral: the prompts with neutral words in the hint's place, which its effect is taken against. weight: guidance.
    """
    both = [*zip(prompts, replies, strict=True), *zip(prompts, hinted_replies, strict=True)]
    plain = [(prompt, reply.ids) for (prompt, _), reply in both]
    with policy.reference():
        base = _flat(policy, plain)
        hinted = _flat(policy, [(prompt, reply.ids) for (_, prompt), reply in both])
        if neutral is not None:
            replies_again = [*replies, *hinted_replies]
            aside = [(prompt, reply.ids) for prompt, reply in zip([*neutral, *neutral], replies_again, strict=True)]
            untold = _flat(policy, aside)
            hinted = moved_once(base, hinted, untold, weight)
    return Yardstick(plain, base, hinted)


def _flat(policy: LoraPolicy, pairs: _Pairs) -> tuple[float, ...]:
    return tuple(value for values in forced_log_probs(policy, pairs) for value in values)

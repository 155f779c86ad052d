"""Learned share of a wish, without a rule and without a judge: the policy's way, projected on the hint's.

Two replies to each of a few prompts are fixed beforehand: one of the base, one of the base that reads the hint. Over
all their tokens

    share = Σ (log π − log b)(log b_h − log b) / Σ (log b_h − log b)²

for the policy π, the base b, and the base b_h that reads the hint. 0 is the base, 1 is as far as the hint itself goes,
and 1 + w is the place of a teacher with guidance w.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.learning.fleet import Reply
from benchmarks.learning.subject import forced_log_probs
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Ids

_Pairs = Sequence[tuple[Ids, Ids]]


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Fixed texts, and the hint's effect on them."""

    pairs: _Pairs
    """(prompt without the hint, reply)."""
    base: tuple[float, ...]
    hint_effect: tuple[float, ...]
    """log b_h − log b of every token."""

    def share(self, policy: LoraPolicy) -> float:
        now = _flat(policy, self.pairs)
        moved = sum((a - b) * effect for a, b, effect in zip(now, self.base, self.hint_effect, strict=True))
        return moved / sum(effect * effect for effect in self.hint_effect)


def yardstick(
    policy: LoraPolicy,
    prompts: Sequence[tuple[Ids, Ids]],
    replies: Sequence[Reply],
    hinted_replies: Sequence[Reply],
) -> Yardstick:
    """Return the yardstick of these prompts, each (plain, with the hint), and of their two replies."""
    both = [*zip(prompts, replies, strict=True), *zip(prompts, hinted_replies, strict=True)]
    plain = [(prompt, reply.ids) for (prompt, _), reply in both]
    with policy.reference():
        base = _flat(policy, plain)
        hinted = _flat(policy, [(prompt, reply.ids) for (_, prompt), reply in both])
    return Yardstick(plain, base, tuple(a - b for a, b in zip(hinted, base, strict=True)))


def _flat(policy: LoraPolicy, pairs: _Pairs) -> tuple[float, ...]:
    return tuple(value for values in forced_log_probs(policy, pairs) for value in values)

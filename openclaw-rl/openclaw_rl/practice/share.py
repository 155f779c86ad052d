"""Learned share of a wish: how far the policy has gone the way that the wish moves the base, without rule or judge.

On fixed texts, replies of the base and of the base that reads the wish, over all their tokens:

    learned share = Σ (log π − log b) (log b_h − log b) / Σ (log b_h − log b)²

π: the policy; b: the base; b_h: the base that reads the wish; all three on the same tokens at temperature 1. The share
is the least-squares projection of what the policy has moved on what the wish moves. It is 0 at the base and 1 where the
base that reads the wish stands. A guided teacher's own place is 1 + w. Where it takes the wish's effect against neutral
words, `moved_once` gives b_h. The mean gap of practice replies says nothing: the replies change with the policy.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from openclaw_rl.types import LogProbs, PracticeReply

_LEAST = 1e-6
"""Σ (log b_h − log b)² below which a wish moves nothing that could be measured."""


@dataclass(frozen=True, slots=True)
class Forced:
    """Log-probs of one fixed text."""

    policy: LogProbs  # [T]
    base: LogProbs  # [T]
    hinted: LogProbs  # [T]


def learned_share(texts: Iterable[Forced]) -> float | None:
    """Return the learned share over these texts; None if the wish moves none of them, or a number is not finite."""
    along = effect = 0.0
    for text in texts:
        for policy, base, hinted in zip(text.policy, text.base, text.hinted, strict=True):
            along += (policy - base) * (hinted - base)
            effect += (hinted - base) ** 2
    if not math.isfinite(along + effect) or effect < _LEAST:
        return None
    return along / effect


def moved_once(base: LogProbs, hinted: LogProbs, neutral: LogProbs, weight: float) -> LogProbs:
    """Return log b + [log q − log b] / (1 + w), log q = log b_h + w (log b_h − log b_n): the guided teacher at share 1.

    base, hinted, neutral: log-probs [T] of the base alone, with the wish, and with neutral words in its place.
    """
    own = zip(base, hinted, neutral, strict=True)
    return tuple(b + (h - b + weight * (h - n)) / (1 + weight) for b, h, n in own)


def mean_kl(pairs: Iterable[tuple[LogProbs, LogProbs]]) -> float | None:
    """Return mean_t (log π − log b) over replies that π sampled: an estimate of KL(π ‖ b) in nats a token.

    pairs: (policy, base), [T] each. None without a token, or where a number is not finite.
    """
    gaps = [p - b for policy, base in pairs for p, b in zip(policy, base, strict=True)]
    total = math.fsum(gaps) if all(map(math.isfinite, gaps)) else math.nan
    return total / len(gaps) + 0.0 if gaps and math.isfinite(total) else None  # no -0.0 for people


def leak(anchor: PracticeReply) -> float | None:
    """Return how far an anchor's reply is from the base: its teacher is the base without a hint."""
    policy, base = anchor.sample.student_log_probs, anchor.sample.teacher_log_probs
    return None if policy is None or base is None else mean_kl([(policy, base)])

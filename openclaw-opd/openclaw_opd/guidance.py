"""The guided teacher: the base that read the hint, moved on by what the hint says. Pure functions without torch.

    log q_t = log b(a_t | s_t, h) + w · [log b(a_t | s_t, h) − log b(a_t | s_t, n)]      b: the base, w ≥ 0

h is the hint, n stands in its place: neutral words, or nothing. Classifier-free guidance samples text by this rule
(arXiv:2306.17806); here it is the teacher of a distillation. With w = 0 it is the base that read the hint, which a
policy can only equal. The extrapolation starts from a point that never moves with the policy, so it does not compound.

A hint has two effects: of what it says, and of something being said behind the request at all. A small model turns from
the request to whatever was said last, and against a prompt without a hint w makes more of that too: replies talk about
the hint, and no longer answer. Neutral words ("Thank you.") have the second effect alone. Against them w makes more of
what the hint says, and of nothing else.

At a single token q is not normalised: log Z(s_t) is the same for each token of a state, as a baseline is. A table of K
ids has the exact normaliser over the K ids and the tail, which counts as one more id.
"""

import math
from collections.abc import Sequence

from openclaw_rl.types import LogProbs

LEAST_TAIL = 1e-6
"""Least probability of a tail. Below it, 1 − Σ p of an engine's numbers is rounding."""
LEAST_LOG_PROB = -20.0
"""Least log-prob in a table (2e-9): an id that the base rules out without the hint must not take all of the mass."""


def guided(hinted: LogProbs, aside: LogProbs, weight: float) -> LogProbs:
    """Return log q_t of each token, not normalised.

    hinted, aside: the base's log-probs [T] with the hint, and with what its effect is taken against, all finite.
    """
    if not weight:
        return hinted
    return tuple(h + weight * (h - a) for h, a in zip(hinted, aside, strict=True))


def guided_table(hinted: Sequence[LogProbs], aside: Sequence[LogProbs], weight: float) -> tuple[LogProbs, ...]:
    """Return log q of each table's ids, normalised over them and the tail. hinted, aside: of the same ids, [T, K]."""
    if not weight:
        return tuple(hinted)
    return tuple(_row(h, a, weight) for h, a in zip(hinted, aside, strict=True))


def _row(hinted: LogProbs, aside: LogProbs, weight: float) -> LogProbs:
    def moved(h: float, a: float) -> float:
        return (1 + weight) * h - weight * a

    ids = [moved(max(h, LEAST_LOG_PROB), max(a, LEAST_LOG_PROB)) for h, a in zip(hinted, aside, strict=True)]
    # The sum over the tail's ids is not known. By Hölder's inequality it is at least the power of the two sums.
    tail = moved(_log_tail(hinted), _log_tail(aside))
    norm = _log_sum([*ids, tail])
    return tuple(value - norm for value in ids)


def _log_tail(log_probs: LogProbs) -> float:
    return math.log(max(1 - math.fsum(map(math.exp, log_probs)), LEAST_TAIL))


def _log_sum(values: Sequence[float]) -> float:
    largest = max(values)
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))

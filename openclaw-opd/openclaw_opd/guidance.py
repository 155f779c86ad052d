"""The guided teacher: the base that read the hint, moved on by the hint's own effect. Pure functions without torch.

    log q_t = log b(a_t | s_t, h) + w · [log b(a_t | s_t, h) − log b(a_t | s_t)]      b: the base, h: the hint, w ≥ 0

Classifier-free guidance samples text by this rule (arXiv:2306.17806); here it is the teacher of a distillation. With
w = 0 it is the base that read the hint, which a policy can only equal. The extrapolation starts from a point that never
moves with the policy, so it does not compound.

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


def guided(hinted: LogProbs, plain: LogProbs, weight: float) -> LogProbs:
    """Return log q_t of each token, not normalised. hinted, plain: the base's log-probs [T] with the hint and without.

    All numbers must be finite.
    """
    if not weight:
        return hinted
    return tuple(h + weight * (h - p) for h, p in zip(hinted, plain, strict=True))


def guided_table(hinted: Sequence[LogProbs], plain: Sequence[LogProbs], weight: float) -> tuple[LogProbs, ...]:
    """Return log q of each table's ids, normalised over them and the tail. hinted, plain: of the same ids, [T, K]."""
    if not weight:
        return tuple(hinted)
    return tuple(_row(h, p, weight) for h, p in zip(hinted, plain, strict=True))


def _row(hinted: LogProbs, plain: LogProbs, weight: float) -> LogProbs:
    def moved(h: float, p: float) -> float:
        return (1 + weight) * h - weight * p

    ids = [moved(max(h, LEAST_LOG_PROB), max(p, LEAST_LOG_PROB)) for h, p in zip(hinted, plain, strict=True)]
    # The sum over the tail's ids is not known. By Hölder's inequality it is at least the power of the two sums.
    tail = moved(_log_tail(hinted), _log_tail(plain))
    norm = _log_sum([*ids, tail])
    return tuple(value - norm for value in ids)


def _log_tail(log_probs: LogProbs) -> float:
    return math.log(max(1 - math.fsum(map(math.exp, log_probs)), LEAST_TAIL))


def _log_sum(values: Sequence[float]) -> float:
    largest = max(values)
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))

"""The guided teacher: the base that read the hint, moved on by hint and request. Pure functions without torch.

    log q_t = log b(a_t | x, h) + w [log b(a_t | x, h) − log b(a_t | x, n)] + v [log b(a_t | x, n) − log b(a_t | y, n)]

b is the base; each term also reads the tokens before t. h is the hint, and n stands in its place: neutral words, or
nothing. x is the request, and y stands in its place: a neutral request. w, v ≥ 0. Classifier-free guidance samples text
by the first rule (arXiv:2306.17806), and images by two such terms (arXiv:2211.09800); here they are the teacher of a
distillation. With w = v = 0 it is the base that read the hint, which a policy can only equal. The extrapolation starts
from a point that never moves with the policy, so it does not compound.

A hint has two effects: of what it says, and of something being said behind the request at all. A small model turns from
the request to whatever was said last, and against a prompt without a hint w makes more of that too: replies talk about
the hint, and no longer answer. Neutral words ("Thank you.") have the second effect alone. Against them w makes more of
what the hint says, and of nothing else. v makes more of the request itself, so that a guided reply still answers it.

At a single token q is not normalised: log Z(s_t) is the same for each token of a state, as a baseline is. A table of K
ids has the exact normaliser over the K ids and the tail, which counts as one more id.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.types import LogProbs

LEAST_TAIL = 1e-6
"""Least probability of a tail. Below it, 1 − Σ p of an engine's numbers is rounding."""
LEAST_LOG_PROB = -20.0
"""Least log-prob in a table (2e-9): an id that the base rules out without the hint must not take all of the mass."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the two effects: `method.guidance` and `method.request_guidance`."""

    hint: float = 0.0
    request: float = 0.0

    def moved(self, hinted: float, aside: float, away: float) -> float:
        """Return log q of one token from the base's log-probs with hint, with n, and with y and n."""
        return hinted + self.hint * (hinted - aside) + self.request * (aside - away)


NONE = Weights()


def guided(hinted: LogProbs, aside: LogProbs, away: LogProbs, weights: Weights) -> LogProbs:
    """Return log q_t of each token, not normalised. All are the base's log-probs [T], finite."""
    if weights == NONE:
        return hinted
    return tuple(weights.moved(*each) for each in zip(hinted, aside, away, strict=True))


def guided_table(
    hinted: Sequence[LogProbs], aside: Sequence[LogProbs], away: Sequence[LogProbs], weights: Weights
) -> tuple[LogProbs, ...]:
    """Return log q of each table's ids, normalised over them and the tail. All are of the same ids, [T, K]."""
    if weights == NONE:
        return tuple(hinted)
    return tuple(_row(*rows, weights) for rows in zip(hinted, aside, away, strict=True))


def _row(hinted: LogProbs, aside: LogProbs, away: LogProbs, weights: Weights) -> LogProbs:
    ids = [
        weights.moved(*(max(value, LEAST_LOG_PROB) for value in each)) for each in zip(hinted, aside, away, strict=True)
    ]
    # The sum over the tail's ids is not known. By Hölder's inequality it is at least this power of the three sums,
    # where the request's weight is at most the hint's.
    tail = weights.moved(_log_tail(hinted), _log_tail(aside), _log_tail(away))
    norm = _log_sum([*ids, tail])
    return tuple(value - norm for value in ids)


def _log_tail(log_probs: LogProbs) -> float:
    return math.log(max(1 - math.fsum(map(math.exp, log_probs)), LEAST_TAIL))


def _log_sum(values: Sequence[float]) -> float:
    largest = max(values)
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))

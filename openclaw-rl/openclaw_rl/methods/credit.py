"""Credit of the steps of a group of episodes, as pure functions on numbers (float64).

    R(i,k) = o(i) + λ p(i,k)                         R = o where the step has no p
    step_wise: A = (R − mean) / max(std, floor)      over the group's steps of equal index k
    grpo:      A = (o(i) − mean o) / max(std, floor) over the group, for each step of episode i
    single:    A = R − baseline                      an episode without a group

std is the population's. With floor 0 and buckets of two or more, `step_wise` is the public estimator of OpenClaw-RL
(arXiv:2603.10165) but for its 1e-6. Deviations:

- A bucket of one falls back to `grpo`. The public estimator keeps the raw reward there, so the scale jumps on the last
  steps of a long episode.
- The floor. Without it two members that differ by a third of a vote get ±1, like success and failure.

Values without variance have no credit: None. Sums are exact (`fsum`), so the order of members changes nothing.
"""

import math
from collections import Counter
from collections.abc import Sequence


def rewards(outcome: float, process: Sequence[float | None], process_weight: float) -> list[float]:
    """Return R of each step: o + λ p, or o alone where p is absent."""
    return [outcome if p is None else outcome + process_weight * p for p in process]


def standardised(values: Sequence[float], floor: float) -> list[float] | None:
    """Return (v − mean) / max(population std, floor) of each value; None if all are equal, or for less than two."""
    if len(values) < 2 or min(values) == max(values):
        return None
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    if not (scale := max(spread, floor)):  # values so close that their squares vanish
        return None
    return [(value - mean) / scale for value in values]


def grpo(outcomes: Sequence[float], floor: float) -> list[float] | None:
    """Return the advantage of each episode, which all its steps share; None without contrast."""
    return standardised(outcomes, floor)


def step_wise(
    step_rewards: Sequence[Sequence[float]], outcomes: Sequence[float], floor: float
) -> list[list[float | None]]:
    """Return the advantage of each step of each episode; None for a step whose bucket has no contrast."""
    alone = grpo(outcomes, floor)
    credit: list[list[float | None]] = [[] for _ in step_rewards]
    for k in range(max(map(len, step_rewards), default=0)):
        members = [i for i, steps in enumerate(step_rewards) if len(steps) > k]
        if len(members) == 1:
            (i,) = members
            credit[i].append(None if alone is None else alone[i])
            continue
        bucket = standardised([step_rewards[i][k] for i in members], floor)
        for at, i in enumerate(members):
            credit[i].append(None if bucket is None else bucket[at])
    return credit


def single(step_rewards: Sequence[float], baseline: float) -> list[float | None]:
    """Return R − baseline of each step; None where nothing is left of it."""
    return [value - baseline or None for value in step_rewards]


def episode_weights(episodes: Sequence[int]) -> list[float]:
    """Return the weight of each sample of a batch under which every episode weighs the same: B / (E n_e).

    The loss is the mean over the batch's B samples. With these weights it is the mean over its E episodes of the mean
    over the n_e samples that each has in the batch.
    """
    counts = Counter(episodes)
    return [len(episodes) / (len(counts) * counts[episode]) for episode in episodes]

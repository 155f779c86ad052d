"""Whether users began to like replies less at some version: a one-sided permutation test for one change point.

Pure: verdicts in, a finding out. Leaves to others what becomes of it (`watch`).

Why one test over all cuts and not one test a version: a version answers too few turns for a test of its own, and
looking at every cut separately would find a fall by luck. The permuted statistic is therefore the largest over all
cuts too (the change-point form of the permutation test, e.g. Antoch & Hušková 2001).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_TOGETHER = 50
"""Permutations at once. All of them take 20 MB, which the C library then keeps for each thread that ever looked."""


@dataclass(frozen=True, slots=True)
class Fall:
    """Verdicts fell behind `good`: means over `n` turns each."""

    good: int
    """The last version before the fall."""
    before: float
    after: float
    n_before: int
    n_after: int
    p_value: float


def find_fall(
    verdicts: Sequence[tuple[int, int]],
    *,
    min_side: int = 30,
    drop: float = 0.3,
    p_value: float = 0.001,
    permutations: int = 2000,
    seed: int = 0,
) -> Fall | None:
    """The clearest fall between two versions, or None when there is none that is large and unlikely enough.

    verdicts: (version that sampled the turn, verdict in −1, 0, 1), oldest turn first. A cut lies between two versions
    and has at least `min_side` turns on each side. Statistic of a cut: (mean before − mean after) / √(1/n₁ + 1/n₂),
    of which the verdicts' own spread is no part: permuting leaves it as it is. p = (1 + #{permuted ≥ found}) / (1 +
    permutations); the same verdicts and seed give the same answer.
    """
    if min_side < 1:
        raise ValueError("min_side must be at least 1")
    ordered = sorted(verdicts, key=lambda item: item[0])  # stable: turns of one version keep their order
    versions = np.array([version for version, _ in ordered])
    values = np.array([value for _, value in ordered], dtype=np.float64)
    n = len(values)
    cuts = np.array([i for i in range(min_side, n - min_side + 1) if versions[i - 1] != versions[i]], dtype=np.intp)
    if not len(cuts):
        return None
    falls = _falls(values[None, :], cuts)[0]
    scale = np.sqrt(1 / cuts + 1 / (n - cuts))
    large = falls >= drop
    if not large.any():
        return None
    found = int(np.argmax(np.where(large, falls / scale, -np.inf)))
    statistic = falls[found] / scale[found]
    chance, as_large = np.random.default_rng(seed), 0
    for done in range(0, permutations, _TOGETHER):
        rows = min(_TOGETHER, permutations - done)
        shuffled = chance.permuted(np.tile(values, (rows, 1)), axis=1)
        as_large += int(((_falls(shuffled, cuts) / scale).max(axis=1) >= statistic - 1e-12).sum())
    p = (1 + as_large) / (1 + permutations)
    if p >= p_value:
        return None
    cut = int(cuts[found])
    before, after = float(values[:cut].mean()), float(values[cut:].mean())
    return Fall(int(versions[cut - 1]), before, after, cut, n - cut, p)


def _falls(values: NDArray[np.float64], cuts: NDArray[np.intp]) -> NDArray[np.float64]:
    """values [P, N] → mean before − mean after at each cut [P, C]."""
    n = values.shape[1]
    sums = values.cumsum(axis=1)
    before = sums[:, cuts - 1]
    fall: NDArray[np.float64] = before / cuts - (sums[:, -1:] - before) / (n - cuts)
    return fall

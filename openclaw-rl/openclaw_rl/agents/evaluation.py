"""Figures of an evaluation: pass@1 with its 95 % interval, pass@k, the mean reward."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pvariance
from typing import Any

_Z = 1.959964


def figures(passes: Mapping[str, Sequence[bool]], rewards: Sequence[float]) -> dict[str, Any]:
    """Return the figures of tasks and whether each of their episodes passed; empty tasks are left out."""
    tasks = [list(found) for found in passes.values() if found]
    if not tasks:
        return {"tasks": 0, "episodes": 0}
    rates = [fmean(found) for found in tasks]
    fewest = min(len(found) for found in tasks)
    low, high = interval(rates)
    return {
        "tasks": len(tasks),
        "episodes": sum(map(len, tasks)),
        "pass@1": fmean(rates),
        "low": low,
        "high": high,
        "reward": fmean(rewards),
        **{f"pass@{k}": fmean(pass_at(found, k) for found in tasks) for k in (2, 4, 8, 16) if k <= fewest},
    }


def interval(rates: Sequence[float]) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the mean of the tasks' pass rates.

    Episodes of one task are alike, so the tasks are the observations: their variance gives the number of independent
    trials that the mean is worth. One episode per task gives Wilson's own interval.
    """
    mean, tasks = fmean(rates), len(rates)
    spread = pvariance(rates)
    trials = tasks * mean * (1 - mean) / spread if spread > 0 else float(tasks)
    middle = (mean + _Z**2 / (2 * trials)) / (1 + _Z**2 / trials)
    half = _Z / (1 + _Z**2 / trials) * math.sqrt(mean * (1 - mean) / trials + _Z**2 / (4 * trials**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def pass_at(found: Sequence[bool], k: int) -> float:
    """Return the chance that one of k episodes of a task passes: 1 − C(n − c, k) / C(n, k)."""
    n, c = len(found), sum(found)
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def by_kind(kinds: Sequence[tuple[str, bool]]) -> dict[str, float]:
    """Return the pass rate of each kind of task, if there is more than one."""
    total, passed = Counter(kind for kind, _ in kinds), Counter(kind for kind, ok in kinds if ok)
    return {kind: passed[kind] / total[kind] for kind in sorted(total)} if len(total) > 1 else {}

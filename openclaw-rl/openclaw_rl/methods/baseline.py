"""What is taken off a reward before it becomes credit: a mean of *other* rewards of the same kind of turn (user, tool).

    ema      b = the slow mean of the batches before, from 0 on: b ← b + (1 − decay^n)(mean of n rewards − b)
    others   b_i = (S + Σ_{j≠i} r_j) / (W + n − 1): the batch's other rewards, each of weight 1, and the earlier ones,
             whose weight fades by `decay` a turn; S is their sum and W their weight, at most 1 / (1 − decay) turns

Promises: no reward is in its own baseline, so the expected gradient stays what it was without one; the order of a batch
changes nothing; |b| is at most `baseline_limit` ≤ 1, so that praise never turns into blame. With `others` nothing is
credited while every reward so far is the same: there is nothing yet to tell one reply from another by, and the steps
that raw rewards would make there are noise (E[∇ log π] = 0). Nothing is divided by a spread.

`state` is kept with the checkpoint: `baseline_<kind>`, Σ weight · reward of all turns, the weights of an endless past
adding up to 1; for `others` also `baseline_<kind>_mass`, what they add up to so far.
"""

import math
from collections.abc import Mapping, Sequence

from openclaw_rl.settings import MethodSettings
from openclaw_rl.types import Sample


def kind_of(sample: Sample) -> str:
    return "tool" if sample.is_tool_turn else "user"


def baselines(rewards: Sequence[float], kind: str, settings: MethodSettings, state: Mapping[str, float]) -> list[float]:
    """One for each of the batch's rewards of this kind."""
    sofar, limit = state.get(f"baseline_{kind}", 0.0), settings.baseline_limit
    if settings.baseline == "none":
        found = [0.0] * len(rewards)
    elif settings.baseline == "ema":
        found = [sofar] * len(rewards)
    else:
        turns = 1 / (1 - settings.baseline_decay)
        weight = _mass(kind, state) * turns + len(rewards) - 1
        total = sofar * turns + math.fsum(rewards)
        found = [(total - reward) / weight if weight else 0.0 for reward in rewards]
    return [min(max(value, -limit), limit) for value in found]


def remember(rewards: Sequence[float], kind: str, settings: MethodSettings, state: dict[str, float]) -> None:
    """Let the batch's rewards of this kind into `state`."""
    key, share = f"baseline_{kind}", 1 - settings.baseline_decay ** len(rewards)
    if settings.baseline == "others":
        mass = _mass(kind, state)
        state[f"{key}_mass"] = mass + share * (1 - mass)
    sofar = state.get(key, 0.0)
    state[key] = sofar + share * (math.fsum(rewards) / len(rewards) - sofar)


def _mass(kind: str, state: Mapping[str, float]) -> float:
    """A mean that comes from a run with `ema` counts as one of many turns."""
    return state.get(f"baseline_{kind}_mass", 1.0 if f"baseline_{kind}" in state else 0.0)

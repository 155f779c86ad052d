"""What is taken off a reward before it becomes credit: a mean of *other* rewards of the same kind of turn (user, tool).

    ema      b = the slow mean of the batches before, from 0 on: b ← b + (1 − decay^n)(mean of n rewards − b)
    others   b_i = (S + Σ_{j≠i} r_j) / (W + n − 1): the batch's other rewards, each of weight 1, and the earlier ones,
             whose weight fades by `decay` a turn; S is their sum and W their weight, at most 1 / (1 − decay) turns

Promises: no reward is in its own baseline, so b lessens nothing that a reward says; the order of a batch changes
nothing; |b| is at most `baseline_limit` ≤ 1, so that praise never turns into blame. With `others` nothing is credited
while every reward so far is the same: there is nothing yet to tell one reply from another by. Nothing is divided by a
spread.

What raw rewards would do there is noise, and one thing beside it. Of a sum over a reply's T tokens E[∇ log π] is 0; a
step takes their mean, and E[1/T ∇ log π] = ∇E[1/T]. So −1 for everything lengthens replies, +1 shortens them, and a b
that is the rewards' mean takes that out.

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

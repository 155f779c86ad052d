"""Binary RL: the judge's ±1 is the advantage of every token of the reply (OpenClaw-RL, arXiv:2603.10165).

A group has one sample, so nothing is normalised: A_t = r − b, with b a mean of other rewards (`baseline`). Neutral and
unjudged turns never become samples.

Importing this module does not import torch: `score` runs in the server.

What is taken off a reward before it becomes credit: a mean of *other* rewards of the same kind of turn (user, tool).

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
from typing import Literal

from pydantic import Field

from openclaw_rl.methods.base import Dropped, SampleLoss, ScoringTools, TokenTerms, reward_of, sample_of, unusable
from openclaw_rl.settings import MethodSettings, TrainerSettings
from openclaw_rl.types import DropReason, Ids, JudgedTurn, Sample


class BinarySettings(MethodSettings):
    baseline: Literal["none", "ema", "others"] = "ema"
    """Binary RL and Combined: subtract a slow mean of the rewards of the same kind of turn; `others`: of the batch's
    other turns too, so that nothing is learned while all verdicts are the same."""
    baseline_decay: float = Field(default=0.95, gt=0, lt=1)
    baseline_limit: float = Field(default=1.0, gt=0, le=1)
    """The mean is clamped to ± this; 1 clamps nothing."""


def kind_of(sample: Sample) -> str:
    return "tool" if sample.is_tool_turn else "user"


def baselines(rewards: Sequence[float], kind: str, settings: BinarySettings, state: Mapping[str, float]) -> list[float]:
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


def remember(rewards: Sequence[float], kind: str, settings: BinarySettings, state: dict[str, float]) -> None:
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


class BinaryRL:
    name = "binary_rl"
    settings: type[BinarySettings] = BinarySettings

    async def score(self, judged: JudgedTurn, tools: ScoringTools[BinarySettings]) -> Sample | Dropped:
        reason = unusable(judged)
        if reason is not None:
            return Dropped(reason)
        reward = reward_of(judged)
        if reward is None:
            return Dropped(DropReason.UNJUDGED if judged.verdict is None else DropReason.NEUTRAL)
        return sample_of(judged, reward=reward)

    def can_train(self, sample: Sample) -> bool:
        return sample.is_demonstration or sample.reward is not None

    def advantages(
        self, batch: Sequence[Sample], settings: BinarySettings, state: dict[str, float]
    ) -> list[list[float]]:
        """A_t = r − b for every token; b of the sample's kind of turn, by `settings.baseline` (see `baseline`)."""
        rewards: dict[str, list[float]] = {}
        for sample in batch:
            if sample.is_demonstration:
                continue
            if sample.reward is None:
                raise ValueError(f"sample {sample.sample_id}: binary_rl needs a reward")
            rewards.setdefault(kind_of(sample), []).append(sample.reward)
        taken_off = {kind: iter(baselines(values, kind, settings, state)) for kind, values in rewards.items()}
        credit = []
        for sample in batch:
            value = 0.0
            if sample.reward is not None and not sample.is_demonstration:
                value = sample.reward - next(taken_off[kind_of(sample)])
            credit.append([value] * len(sample.response_ids))
        for kind, values in rewards.items():
            remember(values, kind, settings, state)
        return credit

    def gathered_ids(self, sample: Sample) -> Sequence[Ids] | None:
        return None

    def loss(self, sample: Sample, terms: TokenTerms, trainer: TrainerSettings, method: BinarySettings) -> SampleLoss:
        from openclaw_rl.methods.objective import clipped_objective, demonstration_loss

        if sample.is_demonstration:
            return demonstration_loss(terms, method)
        policy = clipped_objective(terms, trainer)
        return SampleLoss(policy.loss_sum, int(terms.loss_mask.sum()), policy.tallies)


METHOD = BinaryRL()

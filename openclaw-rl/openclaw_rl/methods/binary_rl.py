"""Binary RL: the judge's ±1 is the advantage of every token of the reply (OpenClaw-RL, arXiv:2603.10165).

A group has one sample, so rewards are not normalised: A_t = r − b. The baseline b is a mean of *other* rewards of the
same kind of turn (user, tool). Neutral and unjudged turns never become samples.

    ema      b = the slow mean of the batches before, from 0 on: b ← b + (1 − decay^n)(mean of n rewards − b)
    others   b_i = (S + Σ_{j≠i} r_j) / (W + n − 1): the batch's other rewards, each of weight 1, and the earlier ones,
             whose weight fades by `decay` a turn; S is their sum and W their weight, at most 1 / (1 − decay) turns

Promises:

- No reward is in its own baseline, so b takes no signal from a reward.
- The order of a batch has no effect.
- |b| is at most `baseline_limit` ≤ 1, so praise never turns into blame.
- With `others` the credit is 0 while every reward so far is the same: no reply differs from another yet.
- No value is divided by a spread.

The baseline removes noise and one bias. Over a reply's T tokens the sum has E[∇ log π] = 0, but a step takes their
mean, and E[1/T ∇ log π] = ∇E[1/T]. So −1 for every reply lengthens replies, and +1 shortens them. With b as the
rewards' mean this effect cancels.

The checkpoint keeps `state`. `baseline_<kind>` is Σ weight · reward of all turns; the weights of an endless past add up
to 1. `others` also keeps `baseline_<kind>_mass`, the sum of the weights so far.

Importing this module does not import torch, because `score` runs in the server.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from openclaw_rl.methods.base import Dropped, SampleLoss, ScoringTools, TokenTerms, reward_of, sample_of, unusable
from openclaw_rl.settings import MethodSettings, TrainerSettings
from openclaw_rl.types import DropReason, Ids, JudgedTurn, Sample


class BinarySettings(MethodSettings):
    """Settings of the baseline."""

    baseline: Literal["none", "ema", "others"] = "ema"
    """Mean that is subtracted from a reward. `ema`: a slow mean of earlier rewards of the same kind of turn. `others`:
    of the batch's other turns too, so that the policy does not move while all verdicts are the same."""
    baseline_decay: float = Field(default=0.95, gt=0, lt=1)
    """Share of its weight in the mean that an earlier reward keeps after each further turn."""
    baseline_limit: float = Field(default=1.0, gt=0, le=1)
    """Clamp of the mean to ± this; 1 never clamps."""

    @property
    def takes_pictures(self) -> bool:
        return True


def kind_of(sample: Sample) -> str:
    return "tool" if sample.is_tool_turn else "user"


def baselines(rewards: Sequence[float], kind: str, settings: BinarySettings, state: Mapping[str, float]) -> list[float]:
    """Return a baseline for each of the batch's rewards of this kind."""
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
    """Add the batch's rewards of this kind to `state`."""
    key, share = f"baseline_{kind}", 1 - settings.baseline_decay ** len(rewards)
    if settings.baseline == "others":
        mass = _mass(kind, state)
        state[f"{key}_mass"] = mass + share * (1 - mass)
    sofar = state.get(key, 0.0)
    state[key] = sofar + share * (math.fsum(rewards) / len(rewards) - sofar)


def _mass(kind: str, state: Mapping[str, float]) -> float:
    """Return the weight of the past. A mean from a run with `ema` counts as one of many turns."""
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
        """Return A_t = r − b for every token, with the b of the sample's kind of turn."""
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

    practises = False

    async def practise(
        self, judged: JudgedTurn, hint: str | None, tools: ScoringTools[BinarySettings]
    ) -> Sample | Dropped:
        # A reward alone would reinforce itself, turn after turn, with no teacher to hold the policy.
        return Dropped(DropReason.METHOD, "binary_rl has no teacher to practise with")


METHOD = BinaryRL()

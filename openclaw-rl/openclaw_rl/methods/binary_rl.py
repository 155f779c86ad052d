"""Binary RL: the judge's ±1 is the advantage of every token of the reply (OpenClaw-RL, arXiv:2603.10165).

A group has one sample, so nothing is normalised: A_t = r. With `baseline = "ema"` a slow mean of the rewards of the
same kind of turn (user, tool) is subtracted, clamped to ±`baseline_limit`: at most 1, so that it can never turn praise
into blame. Neutral and unjudged turns never become samples.

Importing this module does not import torch: `score` runs in the server.
"""

import math
from collections.abc import Sequence

from openclaw_rl.methods.base import Dropped, SampleLoss, ScoringTools, TokenTerms
from openclaw_rl.methods.turns import reward_of, sample_of, unusable
from openclaw_rl.settings import MethodSettings, TrainerSettings
from openclaw_rl.types import DropReason, Ids, JudgedTurn, Sample


class BinaryRL:
    name = "binary_rl"
    needs_engine = False
    """`score` asks nobody: a replay starts no engine for it."""

    async def score(self, judged: JudgedTurn, tools: ScoringTools) -> Sample | Dropped:
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
        self, batch: Sequence[Sample], settings: MethodSettings, state: dict[str, float]
    ) -> list[list[float]]:
        """A_t = r − b for every token; b is the kind's baseline *before* this batch: it must not know what it corrects.

        b ← b + (1 − decay^n)(mean of the kind's n rewards − b): the order of samples in a batch changes nothing.
        """
        rewards: dict[str, list[float]] = {}
        credit = []
        for sample in batch:
            if sample.is_demonstration:
                credit.append([0.0] * len(sample.response_ids))
                continue
            if sample.reward is None:
                raise ValueError(f"sample {sample.sample_id}: binary_rl needs a reward")
            key = "baseline_tool" if sample.is_tool_turn else "baseline_user"
            rewards.setdefault(key, []).append(sample.reward)
            mean = state.get(key, 0.0) if settings.baseline == "ema" else 0.0
            limit = settings.baseline_limit
            advantage = sample.reward - min(max(mean, -limit), limit)
            credit.append([advantage] * len(sample.response_ids))
        for key, values in rewards.items():
            mean, n = state.get(key, 0.0), len(values)
            state[key] = mean + (1 - settings.baseline_decay**n) * (math.fsum(values) / n - mean)
        return credit

    def gathered_ids(self, sample: Sample) -> Sequence[Ids] | None:
        return None

    def loss(self, sample: Sample, terms: TokenTerms, trainer: TrainerSettings, method: MethodSettings) -> SampleLoss:
        from openclaw_rl.methods.objective import clipped_objective, demonstration_loss

        if sample.is_demonstration:
            return demonstration_loss(terms, method)
        policy = clipped_objective(terms, trainer)
        return SampleLoss(policy.loss_sum, int(terms.loss_mask.sum()), policy.tallies)


METHOD = BinaryRL()

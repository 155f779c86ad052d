"""Binary RL: the judge's ±1 is the advantage of every token of the reply (OpenClaw-RL, arXiv:2603.10165).

A group has one sample, so nothing is normalised: A_t = r − b, with b a mean of other rewards (`baseline`). Neutral and
unjudged turns never become samples.

Importing this module does not import torch: `score` runs in the server.
"""

from collections.abc import Sequence

from openclaw_rl.methods.base import Dropped, SampleLoss, ScoringTools, TokenTerms
from openclaw_rl.methods.baseline import baselines, kind_of, remember
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

    def loss(self, sample: Sample, terms: TokenTerms, trainer: TrainerSettings, method: MethodSettings) -> SampleLoss:
        from openclaw_rl.methods.objective import clipped_objective, demonstration_loss

        if sample.is_demonstration:
            return demonstration_loss(terms, method)
        policy = clipped_objective(terms, trainer)
        return SampleLoss(policy.loss_sum, int(terms.loss_mask.sum()), policy.tallies)


METHOD = BinaryRL()

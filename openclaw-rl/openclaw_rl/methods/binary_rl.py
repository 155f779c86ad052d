"""Binary RL: the judge's ±1 is the advantage of every token of the reply (OpenClaw-RL, arXiv:2603.10165).

A group has one sample, so nothing is normalised: A_t = r. With `baseline = "ema"` a slow mean of the rewards of the
same kind of turn (user, tool) is subtracted, clamped to ±0.5 so that it can never turn praise into blame. Neutral and
unjudged turns never become samples.

Importing this module does not import torch: `score` runs in the server.
"""

import math
from collections.abc import Sequence

from openclaw_rl.methods.base import Dropped, SampleLoss, ScoringTools, TokenTerms
from openclaw_rl.settings import MethodSettings, TrainerSettings
from openclaw_rl.types import DropReason, JudgedTurn, Sample

BASELINE_LIMIT = 0.5
DUAL_CLIP = 3.0
"""With `old_log_probs = "rollout"`: the loss of a token with A < 0 is at most 3 |A|."""


class BinaryRL:
    name = "binary_rl"

    async def score(self, judged: JudgedTurn, tools: ScoringTools) -> Sample | Dropped:
        turn, verdict = judged.turn, judged.verdict
        if turn.drop is not None:
            return Dropped(turn.drop)
        if verdict is None:
            return Dropped(DropReason.UNJUDGED)
        if verdict.value == 0:
            return Dropped(DropReason.NEUTRAL)
        if not judged.request.sampling.is_trainable:
            return Dropped(DropReason.NOT_TRAINABLE_SAMPLING)
        if not any(turn.loss_mask) or not judged.request.prompt_ids:
            return Dropped(DropReason.EMPTY)
        if not all(math.isfinite(value) for value in turn.rollout_log_probs):
            return Dropped(DropReason.NON_FINITE)
        return Sample(
            sample_id=turn.turn_id,
            prompt_ids=judged.request.prompt_ids,
            response_ids=turn.response_ids,
            loss_mask=turn.loss_mask,
            rollout_log_probs=turn.rollout_log_probs,
            versions=turn.versions,
            temperature=judged.request.sampling.temperature,
            is_tool_turn=judged.next_state.is_tool,
            reward=float(verdict.value),
        )

    def advantages(
        self, batch: Sequence[Sample], settings: MethodSettings, state: dict[str, float]
    ) -> list[list[float]]:
        """A_t = r − b for every token; b is the kind's baseline *before* this batch: it must not know what it corrects.

        b ← b + (1 − decay^n)(mean of the kind's n rewards − b): the order of samples in a batch changes nothing.
        """
        rewards: dict[str, list[float]] = {}
        credit = []
        for sample in batch:
            if sample.reward is None:
                raise ValueError(f"sample {sample.sample_id}: binary_rl needs a reward")
            key = "baseline_tool" if sample.is_tool_turn else "baseline_user"
            rewards.setdefault(key, []).append(sample.reward)
            mean = state.get(key, 0.0) if settings.baseline == "ema" else 0.0
            advantage = sample.reward - min(max(mean, -BASELINE_LIMIT), BASELINE_LIMIT)
            credit.append([advantage] * len(sample.response_ids))
        for key, values in rewards.items():
            mean, n = state.get(key, 0.0), len(values)
            state[key] = mean + (1 - settings.baseline_decay**n) * (math.fsum(values) / n - mean)
        return credit

    def loss(self, sample: Sample, terms: TokenTerms, settings: TrainerSettings) -> SampleLoss:
        """The clipped objective of DESIGN §4, plus β_KL times the k3 KL to the frozen reference.

        `old_log_probs = "recompute"`: old is this forward pass, detached, and truncated importance weights correct for
        the engine. `"rollout"`: old is what the engine measured, no weights, dual clip. Never both.
        """
        from openclaw_rl import losses

        if settings.old_log_probs == "recompute":
            importance = losses.importance_weights(
                terms.old_log_probs,
                terms.rollout_log_probs,
                terms.loss_mask,
                ceiling=settings.tis_clip,
                mask_outside=settings.tis_mask,
            )
            keep, weights, dual_clip = importance.keep, importance.weights, None
        else:
            keep, weights, dual_clip = terms.loss_mask, None, DUAL_CLIP
        tensors = (terms.log_probs, terms.old_log_probs, terms.advantages, keep)
        low, high = settings.clip_low, settings.clip_high
        loss = losses.clipped_policy_loss(*tensors, clip_low=low, clip_high=high, dual_clip=dual_clip, weights=weights)
        clipped = losses.is_clipped(*tensors, clip_low=low, clip_high=high, dual_clip=dual_clip)
        current = terms.log_probs.detach().masked_fill(~terms.loss_mask, 0)
        disagreement = (current - terms.rollout_log_probs).masked_fill(~terms.loss_mask, 0)
        sums = {
            "abs_log_ratio": float(disagreement.abs().sum()),
            "masked_share": float((terms.loss_mask & ~keep).sum()),
            "clip_share": float(clipped.sum()),
            "neg_log_prob": float(-current.sum()),
        }
        if terms.ref_log_probs is not None:
            kl = losses.k3_kl(terms.log_probs, terms.ref_log_probs, terms.loss_mask).sum()
            loss = loss + settings.kl_coef * kl
            sums["ref_kl"] = float(kl.detach())
        return SampleLoss(loss_sum=loss, token_count=int(terms.loss_mask.sum()), sums=sums)


METHOD = BinaryRL()

"""On-policy distillation from hindsight hints (OpenClaw-RL, arXiv:2603.10165).

The policy that has read the hint teaches the policy that has not, token by token, on the reply of the turn.

Token level (`top_k = 0`): A_t = clip(teacher_t − student_t, ±opd_clip) goes through the clipped objective that every
method shares. With a top-k the loss is a divergence over the teacher's likeliest ids and a tail, and there is no
advantage. A sample is trained as it was scored: its own terms decide, not the present settings.

`hindsight` computes the distillation term of one turn, for OPD and for Combined. It never raises for a judge, teacher
or engine that fails. The term is then absent, with a counted reason, and the turn keeps its reward.

Importing this module does not import torch, because `score` runs in the server.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from openclaw_opd.hindsight import Absent, Hindsight, top_k_of
from openclaw_opd.hints import ANCHOR, Found, find_hints, practice_hint
from openclaw_opd.settings import OpdSettings
from openclaw_opd.teacher import score_hints
from openclaw_rl.errors import AlignmentError, TeacherError
from openclaw_rl.methods.base import (
    HINT_JUDGE,
    Dropped,
    SampleLoss,
    ScoringTools,
    Tally,
    TokenTerms,
    sample_of,
    unusable,
)
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.types import DropReason, Ids, JudgedTurn, LogProbs, Sample

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Absent", "Hindsight", "hindsight"]


async def hindsight(judged: JudgedTurn, tools: ScoringTools[OpdSettings]) -> Hindsight:
    """Return the turn's distillation term, or the reason of its absence. The caller checks `unusable` first."""
    found = await find_hints(judged, tools)
    if found.absent is Absent.JUDGE_FAILED:
        tools.health.failed(HINT_JUDGE, found.detail)
    elif found.source == "judge":
        tools.health.ok(HINT_JUDGE)
    return await _scored(judged, found, tools, kind="hindsight")


async def practice_term(judged: JudgedTurn, hint: str | None, tools: ScoringTools[OpdSettings]) -> Hindsight:
    """Return the distillation term of a practice reply, or the reason of its absence. The caller checks `unusable`.

    hint None: an anchor. Raises TeacherError in an outage.
    """
    found = practice_hint(judged, hint)
    answer = await _checked(judged, await _scored(judged, found, tools, kind=found.source), tools)
    if answer.absent is not None and answer.absent.may_work_later:
        raise TeacherError(why_absent(answer))
    return answer


async def _scored(judged: JudgedTurn, found: Found, tools: ScoringTools[OpdSettings], *, kind: str) -> Hindsight:
    if found.absent is not None:
        answer = Hindsight(found.absent, found.detail)
    else:
        answer = await score_hints(judged, found, tools)
    answer = replace(answer, source=found.source or None)
    tools.health.count(f"{kind}_{answer.absent or 'scored'}")
    return answer


class OPD:
    name = "opd"
    settings: type[OpdSettings] = OpdSettings

    async def score(self, judged: JudgedTurn, tools: ScoringTools[OpdSettings]) -> Sample | Dropped:
        """Return the sample; drop a turn without the term, with the reason. Raises TeacherError in an outage."""
        reason = unusable(judged)
        if reason is not None:
            return Dropped(reason)
        found = await distillation_term(judged, tools)
        if found.absent is None:
            return scored_sample(judged, found, reward=None)
        if found.absent.may_work_later:
            raise TeacherError(why_absent(found))
        return Dropped(DropReason.METHOD, why_absent(found))

    def can_train(self, sample: Sample) -> bool:
        return sample.is_demonstration or sample.teacher_log_probs is not None

    def advantages(self, batch: Sequence[Sample], settings: OpdSettings, state: dict[str, float]) -> list[list[float]]:
        """Return the clipped gap of a sample with both sides and no top-k. Others get zeros: `loss` adds their term."""
        for sample in batch:
            if not self.can_train(sample):
                raise ValueError(f"sample {sample.sample_id}: opd needs a teacher's term")
        return [token_credit(sample, settings) or [0.0] * len(sample.response_ids) for sample in batch]

    def gathered_ids(self, sample: Sample) -> Sequence[Ids] | None:
        table = top_k_of(sample)
        return None if table is None else table.ids

    def loss(self, sample: Sample, terms: TokenTerms, trainer: TrainerSettings, method: OpdSettings) -> SampleLoss:
        return distilled_loss(sample, terms, trainer, method, weight=1.0)

    practises = True

    async def practise(
        self, judged: JudgedTurn, hint: str | None, tools: ScoringTools[OpdSettings]
    ) -> Sample | Dropped:
        return await practice_sample(judged, hint, tools, reward=None)


async def practice_sample(
    judged: JudgedTurn, hint: str | None, tools: ScoringTools[OpdSettings], *, reward: float | None
) -> Sample | Dropped:
    """Return the sample of a practice reply; drop one without a teacher's term. Raises TeacherError in an outage.

    hint None: an anchor, whose credit is clip(log b(a_t | s_t) − log π(a_t | s_t), ±c) for the base b.
    """
    reason = unusable(judged)
    if reason is not None:
        return Dropped(reason)
    if not tools.settings.can_practise:
        return Dropped(DropReason.METHOD, 'practice needs a teacher that stays: method.teacher = "base"')
    found = await practice_term(judged, hint, tools)
    # A reward alone is no sample here: the teacher is what holds practice to the request.
    if found.absent is not None:
        return Dropped(DropReason.METHOD, why_absent(found))
    return scored_sample(judged, found, reward=reward)


async def distillation_term(judged: JudgedTurn, tools: ScoringTools[OpdSettings]) -> Hindsight:
    """Return `hindsight` with its top-k checked."""
    return await _checked(judged, await hindsight(judged, tools), tools)


async def _checked(judged: JudgedTurn, found: Hindsight, tools: ScoringTools[OpdSettings]) -> Hindsight:
    """Return the term with its top-k checked. A table that does not fit the reply is a failure of the teacher."""
    if found.top_k is None:
        return found
    try:
        await asyncio.to_thread(found.top_k.check, len(judged.turn.response_ids))
    except AlignmentError as error:
        tools.health.count("hindsight_misaligned")
        return Hindsight(Absent.TEACHER_FAILED, str(error), source=found.source)
    return found


def scored_sample(judged: JudgedTurn, found: Hindsight, *, reward: float | None) -> Sample:
    return sample_of(
        judged,
        reward=reward,
        teacher_log_probs=found.teacher_log_probs,
        student_log_probs=found.student_log_probs,
        scored_version=found.scored_version,
        hint=found.term(),
    )


def why_absent(found: Hindsight) -> str:
    return f"{found.absent}: {found.detail}" if found.detail else str(found.absent)


def token_credit(sample: Sample, settings: OpdSettings) -> list[float] | None:
    """Return the clipped gap of each token [T], an anchor's times `anchor_weight`.

    None for an absent term, a top-k, or an absent student's side.
    """
    if sample.teacher_log_probs is None or sample.student_log_probs is None or top_k_of(sample) is not None:
        return None
    import torch

    from openclaw_opd.losses import distillation_advantages

    sides = (sample.teacher_log_probs, sample.student_log_probs)
    teacher, student = (torch.tensor(side, dtype=torch.float64) for side in sides)
    credit = distillation_advantages(teacher, student, clip=settings.opd_clip) * anchor_weight(sample, settings)
    return [float(value) for value in credit]


def anchor_weight(sample: Sample, settings: OpdSettings) -> float:
    """Return the weight of a sample's distillation term: 1, but for anchors."""
    is_anchor = sample.hint is not None and sample.hint.source == ANCHOR
    return settings.anchor_weight if is_anchor else 1.0


def distilled_loss(
    sample: Sample, terms: TokenTerms, trainer: TrainerSettings, method: OpdSettings, *, weight: float
) -> SampleLoss:
    """Return the clipped objective on `terms.advantages`, plus `weight` times the rest of the distillation term.

    The rest is the gap to the trainer's own log-probs, or the top-k divergence; an anchor's has the weight
    `anchor_weight` besides. The objective masks tokens where trainer and engine disagree. The divergence leaves them
    out too, because the teacher's numbers are that engine's.
    """
    import torch

    from openclaw_opd.losses import distillation_advantages, top_k_divergence
    from openclaw_rl.methods.objective import clipped_objective, demonstration_loss

    if sample.is_demonstration:
        return demonstration_loss(terms, method)

    def tensor(values: Sequence[float] | Sequence[LogProbs]) -> "Tensor":
        return torch.tensor(values, dtype=terms.log_probs.dtype, device=terms.log_probs.device)

    weight *= anchor_weight(sample, method)
    has_hint, has_reward = sample.teacher_log_probs is not None, sample.reward is not None
    tallies = {
        "hint_share": Tally(has_hint, 1),
        "reward_share": Tally(has_reward, 1),
        "hint_and_reward_share": Tally(has_hint and has_reward, 1),
    }
    table = top_k_of(sample)
    if sample.teacher_log_probs is not None:
        student = terms.unscaled_log_probs if sample.student_log_probs is None else tensor(sample.student_log_probs)
        if student is None:
            raise ValueError(f"sample {sample.sample_id}: no log-probs of the student at temperature 1")
        teacher = tensor(sample.teacher_log_probs)
        tallies |= _gap_tallies((teacher - student.detach())[terms.loss_mask], method.opd_clip)
        if sample.student_log_probs is None and table is None:
            credit = distillation_advantages(teacher, student, clip=method.opd_clip)
            terms = replace(terms, advantages=terms.advantages + weight * credit)
    policy = clipped_objective(terms, trainer)
    loss = policy.loss_sum
    if table is not None:
        if terms.gathered_log_probs is None:
            raise ValueError(f"sample {sample.sample_id}: no log-probs of the teacher's top-k ids")
        divergence = top_k_divergence(
            terms.gathered_log_probs, tensor(table.log_probs), policy.keep, forward=method.forward_kl
        )
        loss = loss + weight * divergence.kl
        count = int(policy.keep.sum())
        tallies["top_k_kl"] = Tally(float(divergence.kl.detach()), count)
        tallies["student_tail"] = Tally(float(divergence.student_tail), count)
    return SampleLoss(loss, int(terms.loss_mask.sum()), policy.tallies | tallies)


def _gap_tallies(gap: "Tensor", clip: float) -> dict[str, Tally]:
    """Return the tallies of the trained tokens' gaps, before the clip."""
    count = len(gap)
    return {
        "gap": Tally(float(gap.sum()), count),
        "gap_abs": Tally(float(gap.abs().sum()), count),
        "gap_clip_share": Tally(float((gap.abs() > clip).sum()), count),
    }


METHOD = OPD()

"""From a judged turn to a sample: what every method asks of a turn first, and the fields that no method decides."""

import math

from openclaw_rl.types import DropReason, JudgedTurn, LogProbs, Sample


def unusable(judged: JudgedTurn) -> DropReason | None:
    """Why nothing can be trained on this turn, whatever was said of it; None when something can."""
    turn = judged.turn
    if turn.drop is not None:
        return turn.drop
    if not judged.request.sampling.is_trainable:
        return DropReason.NOT_TRAINABLE_SAMPLING
    if not any(turn.loss_mask) or not judged.request.prompt_ids:
        return DropReason.EMPTY
    if not all(math.isfinite(value) for value in turn.rollout_log_probs):
        return DropReason.NON_FINITE
    return None


def reward_of(judged: JudgedTurn) -> float | None:
    """±1, or None: a verdict of 0 and no verdict at all give no reward."""
    return float(judged.verdict.value) if judged.verdict is not None and judged.verdict.value else None


def sample_of(
    judged: JudgedTurn,
    *,
    reward: float | None,
    teacher_log_probs: LogProbs | None = None,
    student_log_probs: LogProbs | None = None,
    scored_version: int | None = None,
    extra_json: str | None = None,
) -> Sample:
    """The turn exactly as sampled, with the terms a method found for it. Raises AlignmentError where they do not
    fit."""
    turn, request = judged.turn, judged.request
    return Sample(
        sample_id=turn.turn_id,
        prompt_ids=request.prompt_ids,
        response_ids=turn.response_ids,
        loss_mask=turn.loss_mask,
        rollout_log_probs=turn.rollout_log_probs,
        versions=turn.versions,
        temperature=request.sampling.temperature,
        is_tool_turn=judged.next_state.is_tool,
        reward=reward,
        teacher_log_probs=teacher_log_probs,
        student_log_probs=student_log_probs,
        scored_version=scored_version,
        extra_json=extra_json,
    )

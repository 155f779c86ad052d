"""Tokens to a `Turn`: what was sampled, exactly, and whether it may ever be trained on.

The reply's text is carried along for people and for pairing; nothing that is trained on is made from it.
"""

import math
from dataclasses import dataclass

from openclaw_rl.messages import Message
from openclaw_rl.proxy.generation import Sampled
from openclaw_rl.settings import SamplingSettings
from openclaw_rl.types import DropReason, Request, Turn


@dataclass(frozen=True, slots=True)
class Ending:
    """How a reply ended, beside its tokens."""

    finish_reason: str
    """`stop`, `length`, `tool_calls` or `cancelled`."""
    reply: Message
    kept: int | None = None
    """Tokens in front of a stop string; None when none matched."""
    opted_out: bool = False


def record(
    request: Request,
    turn_id: str,
    sampled: Sampled,
    ending: Ending,
    settings: SamplingSettings,
    *,
    vocab_size: int,
    at: float,
) -> Turn:
    """The turn of this reply; never raises for what the engine did. at: when it was finished."""
    t = len(sampled.ids)
    kept = t if ending.kept is None else ending.kept
    drop = _drop(request, sampled, ending, kept, settings)
    if drop is None and max(sampled.ids) >= vocab_size:
        drop = DropReason.MISALIGNED
    return Turn(
        turn_id=turn_id,
        request_id=request.request_id,
        finished_at=at,
        response_ids=tuple(sampled.ids),
        rollout_log_probs=tuple(sampled.log_probs),
        loss_mask=(True,) * kept + (False,) * (t - kept),
        versions=sampled.versions,
        finish_reason=ending.finish_reason,
        reply=ending.reply,
        drop=drop,
        cached_tokens=sampled.cached_tokens,
    )


def _drop(
    request: Request, sampled: Sampled, ending: Ending, kept: int, settings: SamplingSettings
) -> DropReason | None:
    sampling = request.sampling
    if ending.opted_out:
        return DropReason.OPTED_OUT
    if ending.finish_reason == "cancelled":
        return DropReason.CANCELLED
    if kept == 0:
        return DropReason.EMPTY
    if not sampled.is_aligned:
        return DropReason.MISALIGNED
    if not all(map(math.isfinite, sampled.log_probs)):
        return DropReason.NON_FINITE
    if not sampling.is_trainable:
        return DropReason.NOT_TRAINABLE_SAMPLING
    if sampling.seed is not None and sampled.is_joined:
        return DropReason.NOT_TRAINABLE_SAMPLING  # a seed does not go on where it was cut
    if sampling.is_truncated and settings.truncated_sampling == "drop":
        return DropReason.TRUNCATED_SAMPLING
    return None

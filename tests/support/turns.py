"""A turn as a test wants it: it says what it is about, and the rest is made up."""

import asyncio
from typing import Any

from openclaw_rl.ledger import Ledger
from openclaw_rl.messages import Message
from openclaw_rl.types import DropReason, Ids, LogProbs, Request, SamplingParams, Scope, Turn, TurnKey, VersionRun

KEY = TurnKey("r", "b", "h")


def make_request(
    name: str,
    *messages: Message,
    user: str = "ann",
    session: str | None = "s",
    text: str = "q",
    prompt: Ids = (1, 2),
    at: float = 1.0,
    **more: Any,
) -> Request:
    """`more`: other fields of `Request`."""
    fields = {"tools_json": None, "template_kwargs_json": None, "sampling": SamplingParams(8), **more}
    said = messages or (Message(role="user", content=text),)
    return Request(name, Scope(user, session), at, said, prompt_ids=prompt, **fields)


def make_turn(
    name: str,
    *,
    request: str | None = None,
    ids: Ids | None = None,
    log_probs: LogProbs | None = None,
    mask: tuple[bool, ...] | None = None,
    runs: tuple[VersionRun, ...] | None = None,
    version: int = 0,
    reply: Message | str = "a",
    drop: DropReason | None = None,
    at: float = 2.0,
) -> Turn:
    """request: its id, the turn's own name when None. Two tokens, or as many as `runs` or `ids` say."""
    n = len(ids) if ids is not None else sum(run.length for run in runs) if runs else 2
    return Turn(
        turn_id=name,
        request_id=request or name,
        finished_at=at,
        response_ids=tuple(range(10, 10 + n)) if ids is None else ids,
        rollout_log_probs=log_probs or (-0.5,) * n,
        loss_mask=mask or (True,) * n,
        versions=runs or (VersionRun(version, n),),
        finish_reason="stop",
        reply=Message(role="assistant", content=reply) if isinstance(reply, str) else reply,
        drop=drop,
    )


async def serve_turn(ledger: Ledger, request: Request, turn: Turn, key: TurnKey = KEY) -> str:
    """Both writes, in one commit unless it has pictures, whose files are written first; the turn's id."""
    if request.pictures:
        await ledger.begin(request)
        await ledger.finish(turn, key)
        return turn.turn_id
    await asyncio.gather(ledger.begin(request), ledger.finish(turn, key))
    return turn.turn_id

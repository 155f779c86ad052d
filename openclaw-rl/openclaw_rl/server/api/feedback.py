"""`POST /v1/feedback`: a user's explicit feedback on a reply. It wins over the judge.

A chat key reaches the turns of its own user alone; any other turn does not exist for it. The same `feedback_id` is the
same feedback, so a client that got no answer may send it again. The request waits for no judge and no trainer, and
feedback may come at any time: the answer's `effect` names its consequence.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, ValidationError

from openclaw_rl.errors import FeedbackReused, RequestError
from openclaw_rl.ledger import Effect, FeedbackOutcome, FeedbackTarget
from openclaw_rl.types import Feedback, Ids, WrittenReply
from openclaw_rl.web.auth import Caller, Keys
from openclaw_rl.web.bodies import read_body
from openclaw_rl.web.client_gone import ClientGone

_BODY_BYTES, _BODY_S = 2**20, 30.0


class FeedbackBody(BaseModel):
    """One of `turn_id`, `id` and `session_id`; at least one of `value`, `comment` and `demonstration`."""

    model_config = ConfigDict(extra="forbid")

    turn_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """The `id` of the reply."""
    id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Other name of `turn_id`: the field's name in the reply."""
    session_id: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """The newest turn of this session."""
    value: StrictBool | StrictInt | StrictFloat | None = None
    """True, false, or a number in [-1, 1]: its sign is the reward, 0 is neutral."""
    comment: Annotated[str, Field(max_length=8000)] | None = None
    """The user's wish for this reply, in words: a hint for the methods that learn from hints."""
    demonstration: Annotated[str, Field(max_length=200_000)] | None = None
    """The reply the user would have liked: the model is trained to give it."""
    feedback_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Name of this feedback, which makes a repeated request harmless; the server makes one when absent."""


class FeedbackLedger(Protocol):
    """Methods of the ledger that feedback uses."""

    async def feedback_target(
        self, *, user: str, turn_id: str | None = None, session_id: str | None = None
    ) -> FeedbackTarget | None: ...

    async def record_feedback(
        self, said: Feedback, *, user: str, demonstration: Ids | None = None, given: int = 0
    ) -> FeedbackOutcome: ...


class ReplyTokens(Protocol):
    """Members of the front end that feedback uses."""

    context_length: int

    def written_reply(self, text: str) -> WrittenReply: ...


@dataclass(frozen=True, slots=True)
class FeedbackDeps:
    ledger: FeedbackLedger
    keys: Keys
    frontend: ReplyTokens
    on_judged: Callable[[], None]
    """A turn waits to be scored."""
    on_sampled: Callable[[], None]
    """A demonstration waits for a trainer."""
    on_paired: Callable[[], None] = lambda: None
    """A turn waits for the judge: its feedback was taken back."""
    clock: Callable[[], float] = time.time


def build_feedback_router(deps: FeedbackDeps) -> APIRouter:
    router = APIRouter()
    schema = {"content": {"application/json": {"schema": FeedbackBody.model_json_schema()}}, "required": True}

    @router.post("/v1/feedback", openapi_extra={"requestBody": schema})
    async def feedback(request: Request) -> Response:
        caller = deps.keys.caller(request.headers.get("authorization"))  # before a byte of the body is read
        try:
            data = await read_body(request.scope, request.receive, _BODY_BYTES, timeout_s=_BODY_S)
        except ClientGone:
            return Response(status_code=400)
        outcome = await record(deps, caller, _parse(data))
        return JSONResponse(
            {
                "feedback_id": outcome.feedback_id,
                "turn_id": outcome.turn_id,
                "state": str(outcome.state),
                "effect": str(outcome.effect),
                "demonstration_id": outcome.demonstration_id,
            }
        )

    return router


async def record(deps: FeedbackDeps, caller: Caller, body: FeedbackBody) -> FeedbackOutcome:
    """Record feedback of a caller. Raises RequestError for another user's turn."""
    target = await deps.ledger.feedback_target(
        user=caller.user, turn_id=body.turn_id or body.id, session_id=body.session_id
    )
    if target is None:
        what = (
            f"session {body.session_id!r} with a recorded turn"
            if body.session_id
            else f"turn {body.turn_id or body.id!r}"
        )
        raise RequestError(f"you have no {what}", status=404, code="turn_not_found")
    said = Feedback(
        feedback_id=body.feedback_id or f"feedback-{uuid.uuid4().hex}",
        turn_id=target.turn_id,
        at=deps.clock(),
        value=None if body.value is None else _number(body.value),
        comment=body.comment,
        demonstration=body.demonstration,
    )
    ids, given = None, 0
    if said.demonstration is not None and caller.train:
        written = await _reply(deps.frontend, said.demonstration, target)
        ids, given = written.ids, written.given
    try:
        outcome = await deps.ledger.record_feedback(said, user=caller.user, demonstration=ids, given=given)
    except FeedbackReused as error:
        raise RequestError(str(error), status=409, code="feedback_id_reused", param="feedback_id") from error
    if outcome.effect in (Effect.JUDGED, Effect.RESCORED):
        deps.on_judged()
    if outcome.demonstration_id is not None:
        deps.on_sampled()
    return outcome


async def _reply(frontend: ReplyTokens, text: str, target: FeedbackTarget) -> WrittenReply:
    written = await asyncio.to_thread(frontend.written_reply, text)
    length = len(written.ids)
    if target.prompt_tokens + length > frontend.context_length:
        raise RequestError(
            f"demonstration: its {length} tokens and the prompt's {target.prompt_tokens} are more than the model's"
            f" context of {frontend.context_length}",
            code="context_length_exceeded",
            param="demonstration",
        )
    return written


def _parse(data: bytes) -> FeedbackBody:
    """Raises RequestError that names the field."""
    try:
        body = FeedbackBody.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = str(first["loc"][0]) if first["loc"] else None
        raise RequestError(
            f"{where}: {first['msg']}" if where else first["msg"],
            status=422,
            code="invalid_body" if where else "invalid_json",
            param=where,
        ) from error
    named = [name for name in ("turn_id", "id", "session_id") if getattr(body, name) is not None]
    if len(named) != 1:
        raise RequestError(
            "name one turn: `turn_id` (or `id`: a reply's), or `session_id` for its newest one"
            + (f"; not {' and '.join(named)}" if named else ""),
            param="turn_id",
        )
    for name in ("comment", "demonstration"):
        text = getattr(body, name)
        if text is not None and not text.strip():
            raise RequestError(f"{name} is empty", param=name)
    if body.value is None and body.comment is None and body.demonstration is None:
        raise RequestError("say something: `value`, `comment` or `demonstration`", param="value")
    if body.value is not None and not -1 <= body.value <= 1:
        raise RequestError("value is true, false or a number in [-1, 1]", param="value")
    return body


def _number(value: bool | int | float) -> float:
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    return float(value)

"""Routes that change something: rollback, pin, learning, train, forget.

Routes for the operator and for liveness: `/healthz`, `/v1/admin/*`, `/v1/turns*`, `/metrics`.

`/healthz` answers anyone with a word, and with the admin key says what is wrong; everything else needs that key,
compared in constant time. Nothing here prints a secret.
"""

from typing import Any, Self

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from openclaw_rl.errors import LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.server.api.status import AdminDeps, add_status_routes, known_version, plain, problems
from openclaw_rl.types import TurnState
from openclaw_rl.web.auth import Secret


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Rollback(_Body):
    to: int | None = Field(default=None, ge=0)
    """The version to go back to; the parent of the one that serves when None."""
    requeue: bool = False
    """Let the samples of the abandoned versions wait again."""


class Pin(_Body):
    weight_version: int | None = Field(ge=0)
    """Serve this version and publish nothing by itself; None unpins."""


class Forget(_Body):
    """One of `session_id`, `turn_id` and `everything` (with `user`)."""

    session_id: str | None = Field(default=None, min_length=1)
    turn_id: str | None = Field(default=None, min_length=1)
    """The session that this reply is part of; where it has none, the conversation."""
    user: str | None = Field(default=None, min_length=1)
    """Needed with a session only when several users have one of that name."""
    everything: bool = False
    """All that `user` ever said."""
    rebuild: bool = False
    """Go back behind the versions that were trained on it, and learn again from what is left."""

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if (self.session_id is not None) + (self.turn_id is not None) + self.everything != 1:
            raise ValueError("one of session_id, turn_id and everything is needed")
        if self.everything and self.user is None:
            raise ValueError("everything needs the user")
        if self.turn_id is not None and self.user is not None:
            raise ValueError("a turn has its user")
        return self


class Learning(_Body):
    on: bool


def add_control_routes(guarded: APIRouter, deps: AdminDeps) -> None:
    @guarded.post("/v1/admin/rollback")
    async def rollback(body: Rollback) -> JSONResponse:
        to = body.to
        if to is None:
            to = (await deps.ledger.version(deps.serving.current)).parent
            if to is None:
                raise RequestError(
                    "the base serves: there is nothing to go back to", status=409, code="nothing_to_roll_back"
                )
        await known_version(deps.ledger, to)
        await deps.ledger.rollback(to, requeue=body.requeue)
        await deps.publisher.follow()
        return JSONResponse({"serving": deps.serving.current})

    @guarded.post("/v1/admin/pin")
    async def pin(body: Pin) -> JSONResponse:
        if body.weight_version is not None:
            await known_version(deps.ledger, body.weight_version)
        await deps.publisher.pin(body.weight_version)
        return JSONResponse({"pinned": body.weight_version, "serving": deps.serving.current})

    @guarded.post("/v1/admin/learning")
    async def learning(body: Learning) -> JSONResponse:
        await deps.ledger.set_learning(body.on)
        return JSONResponse({"learning": body.on, "enabled": deps.training.enabled})

    @guarded.post("/v1/admin/train")
    async def train() -> JSONResponse:
        """Let the trainer take whatever waits, however small the batch; not while learning is paused or switched
        off."""
        waiting = (await deps.ledger.counts()).get(TurnState.SAMPLED, 0)
        learning = await deps.ledger.learning()
        if learning and deps.training.enabled:
            deps.train_now()
        return JSONResponse({"waiting": waiting, "learning": learning, "enabled": deps.training.enabled})

    @guarded.post("/v1/admin/forget")
    async def forget(body: Forget) -> JSONResponse:
        """Delete a session, a conversation or a user; the turns are gone from every list, and no batch will hold them.
        What was forgotten stays forgotten when there is nothing to rebuild from: `not_rebuilt` says why."""
        forgetting = deps.forgetting
        try:
            if body.session_id is not None:
                forgotten = await forgetting.session(body.session_id, body.user)
            elif body.turn_id is not None:
                forgotten = await forgetting.conversation(body.turn_id)
            else:
                forgotten = await forgetting.user(body.user or "")
        except LedgerUnavailable:
            raise
        except LedgerError as error:
            raise RequestError(str(error), status=409, code="not_forgotten") from error
        rebuilt, not_rebuilt = None, None
        if body.rebuild:
            try:
                rebuilt = await forgetting.rebuild(forgotten)
            except LedgerError as error:
                not_rebuilt = str(error)
        return JSONResponse(plain(forgotten) | {"rebuilt": plain(rebuilt), "not_rebuilt": not_rebuilt})


def build_admin_router(deps: AdminDeps) -> APIRouter:
    router = APIRouter()

    key = Secret(deps.admin_key)

    def is_admin(request: Request) -> bool:
        return key.opens(request.headers.get("authorization"))

    async def admin(request: Request) -> None:
        if not is_admin(request):
            raise RequestError(
                "this route needs the admin key (keys/admin.key in the data directory)",
                status=401,
                code="invalid_api_key",
            )

    guarded = APIRouter(dependencies=[Depends(admin)])

    @router.get("/healthz")
    async def healthz(request: Request) -> JSONResponse:
        """`ok`, or `degraded` while a part is down; chats are held, not refused, meanwhile. With the admin key also
        which part, and why."""
        found = problems(deps)
        body: dict[str, Any] = {
            "status": "degraded" if found else "ok",
            "weight_version": deps.serving.current,
        }
        if is_admin(request):
            body["problems"] = found
        return JSONResponse(body)

    add_status_routes(guarded, deps)
    add_control_routes(guarded, deps)
    router.include_router(guarded)
    return router

"""Routes for the operator and for liveness: `/healthz`, `/v1/admin/*`, `/v1/turns*`, `/metrics`.

`/healthz` answers anyone with a word, and with the admin key says what is wrong; everything else needs that key,
compared in constant time. Nothing here prints a secret.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from openclaw_rl import metrics, openapi
from openclaw_rl.engines.serving import ServingVersions
from openclaw_rl.errors import LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.forgetting import Forgetting
from openclaw_rl.ledger import Ledger
from openclaw_rl.meters import OUT_AFTER, Meters
from openclaw_rl.proxy.auth import Secret
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.retaining import Retention
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.supervisor import ChildStatus
from openclaw_rl.types import TurnState, Version, VersionState


@dataclass(frozen=True, slots=True)
class AdminDeps:
    admin_key: str
    ledger: Ledger
    serving: ServingVersions
    publisher: Publisher
    meters: Meters
    """How judging and scoring go."""
    children: Callable[[], list[ChildStatus]]
    forgetting: Forgetting
    retention: Retention
    train_now: Callable[[], None]
    training: TrainingSettings
    model_name: str
    method: str
    started_at: float


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

    @guarded.get("/v1/admin/status")
    async def status() -> JSONResponse:
        versions = await deps.ledger.versions(newest=20)
        return JSONResponse(
            {
                "model": deps.model_name,
                "method": deps.method,
                "started_at": deps.started_at,
                "serving": deps.serving.current,
                "pinned": await deps.ledger.pinned(),
                "tip": (await deps.ledger.tip()).weight_version,
                "learning": await deps.ledger.learning(),
                "training": {"enabled": deps.training.enabled, "batch_size": deps.training.batch_size},
                "problems": problems(deps),
                "children": [asdict(child) for child in deps.children()],
                "counts": await deps.ledger.counts(),
                "scoring": {
                    "counts": dict(deps.meters.counts),
                    "means": {name: _plain(mean.value) for name, mean in deps.meters.means.items()},
                },
                "last_gate": _plain(deps.publisher.last_gate),
                "versions": [version_row(version) for version in versions],
            }
        )

    @guarded.get("/v1/admin/history")
    async def history(
        versions: Annotated[int, Query(ge=1, le=1000)] = 200, verdicts: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> JSONResponse:
        """For curves, oldest first: the newest versions with what their steps measured, and the newest verdicts of
        users as [version that gave the reply, verdict]."""
        rows = [version_row(version) for version in await deps.ledger.versions(newest=versions)]
        for row in rows:
            row["metrics"] = json.loads(row.pop("report_json")).get("metrics", {})
        return JSONResponse({"versions": rows, "verdicts": await deps.ledger.user_verdicts(limit=verdicts)})

    @guarded.get("/v1/admin/versions/{weight_version}")
    async def one_version(weight_version: int) -> JSONResponse:
        return JSONResponse(version_row(await known_version(deps.ledger, weight_version)))

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

    @guarded.get("/v1/turns")
    async def turns(
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        state: TurnState | None = None,
        session_id: str | None = None,
        user: str | None = None,
    ) -> JSONResponse:
        rows = await deps.ledger.turns(limit=limit, state=state, session_id=session_id, user=user)
        return JSONResponse({"turns": [_plain(row) for row in rows]})

    @guarded.get("/v1/turns/{turn_id}")
    async def turn(turn_id: str) -> JSONResponse:
        """Why this turn was or was not trained on."""
        record = await deps.ledger.turn(turn_id)
        if record is None:
            raise RequestError(f"no turn {turn_id!r}", status=404, code="turn_not_found")
        return JSONResponse(_plain(record))

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
        return JSONResponse(_plain(forgotten) | {"rebuilt": _plain(rebuilt), "not_rebuilt": not_rebuilt})

    @guarded.get("/openapi.json", include_in_schema=False)
    async def openapi_document(request: Request) -> JSONResponse:
        return JSONResponse(openapi.document(request.app))

    @guarded.get("/metrics")
    async def prometheus() -> Response:
        """Without the ledger's counts while it cannot be read: that it is out of order is said all the same."""
        try:
            counts = await deps.ledger.counts()
        except LedgerUnavailable:
            counts = {}
        return PlainTextResponse(
            metrics.render(counts, deps.serving.current, deps.meters, problems(deps), deps.children()),
            media_type=metrics.CONTENT_TYPE,
        )

    router.include_router(guarded)
    return router


def problems(deps: AdminDeps) -> list[str]:
    """Each part that is down, in words; empty when all is well."""
    found = []
    if deps.ledger.failure:
        found.append(f"ledger: {deps.ledger.failure}; replies are served, not recorded")
    if deps.retention.is_full:
        found.append("ledger: over retention.max_gb, and all that is left in it still waits")
    if not deps.serving.is_open:
        found.append("engine: not ready; chats are held")
    for child in deps.children():
        if child.quick_exits >= OUT_AFTER:
            found.append(f"{child.name}: ended {child.quick_exits} times soon after its start, exit {child.last_exit}")
        elif child.pid is None:
            found.append(f"{child.name}: not running, last exit {child.last_exit}")
    return found + deps.meters.problems()


async def known_version(ledger: Ledger, weight_version: int) -> Version:
    try:
        return await ledger.version(weight_version)
    except LedgerError as error:
        raise RequestError(str(error), status=404, code="version_not_found") from error


def version_row(version: Version) -> dict[str, Any]:
    """A version as operators see it."""
    return {**_plain(version), "state": VersionState(version.state).value}


def _plain(row: object) -> Any:
    """Dataclasses, enums and messages as JSON values."""
    if isinstance(row, BaseModel):
        return row.model_dump(mode="json", exclude_none=True)
    if hasattr(row, "__dataclass_fields__"):
        return {name: _plain(getattr(row, name)) for name in row.__dataclass_fields__}
    if isinstance(row, dict):
        return {key: _plain(value) for key, value in row.items()}
    if isinstance(row, list | tuple):
        return [_plain(value) for value in row]
    if isinstance(row, float) and not math.isfinite(row):
        return None  # JSON has no word for it: the log-prob an engine did not give, a KL that overflowed
    return row

"""Routes that look: `/v1/admin/status`, `history`, `versions`, `/v1/turns*`, `/metrics`, `/openapi.json`.

What the operator's routes work on, and what of it is out of order.

Rows of the ledger as JSON values: what an operator is shown of them.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.errors import LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.hint_term import HintTerm
from openclaw_rl.ledger import Ledger
from openclaw_rl.processes.supervisor import ChildStatus
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.server.api import openapi
from openclaw_rl.server.privacy import Forgetting, Retention
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.telemetry import metrics
from openclaw_rl.telemetry.health import OUT_AFTER, Health
from openclaw_rl.types import Sample, TurnState, Version, VersionState


@dataclass(frozen=True, slots=True)
class AdminDeps:
    admin_key: str
    ledger: Ledger
    serving: VersionAdmission
    publisher: Publisher
    health: Health
    """How judging and scoring go."""
    children: Callable[[], list[ChildStatus]]
    forgetting: Forgetting
    retention: Retention
    train_now: Callable[[], None]
    training: TrainingSettings
    model_name: str
    method: str
    started_at: float


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
    return found + deps.health.problems()


async def known_version(ledger: Ledger, weight_version: int) -> Version:
    try:
        return await ledger.version(weight_version)
    except LedgerError as error:
        raise RequestError(str(error), status=404, code="version_not_found") from error


def version_row(version: Version) -> dict[str, Any]:
    """A version as operators see it."""
    fields = plain(version) | {"state": VersionState(version.state).value, "report_json": version.report.to_json()}
    del fields["report"]
    return fields


def plain(row: object) -> Any:
    """Dataclasses, enums and messages as JSON values."""
    if isinstance(row, BaseModel):
        return row.model_dump(mode="json", exclude_none=True)
    if isinstance(row, HintTerm):
        return row.to_json()
    if isinstance(row, Sample):
        fields = {name: plain(getattr(row, name)) for name in row.__dataclass_fields__}
        return fields | {"extra_json": fields.pop("hint")}
    if hasattr(row, "__dataclass_fields__"):
        return {name: plain(getattr(row, name)) for name in row.__dataclass_fields__}
    if isinstance(row, dict):
        return {key: plain(value) for key, value in row.items()}
    if isinstance(row, list | tuple):
        return [plain(value) for value in row]
    if isinstance(row, float) and not math.isfinite(row):
        return None  # JSON has no word for it: the log-prob an engine did not give, a KL that overflowed
    return row


def add_status_routes(guarded: APIRouter, deps: AdminDeps) -> None:
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
                    "counts": dict(deps.health.counts),
                    "means": {name: plain(mean.value) for name, mean in deps.health.means.items()},
                },
                "last_gate": plain(deps.publisher.last_gate),
                "versions": [version_row(version) for version in versions],
            }
        )

    @guarded.get("/v1/admin/history")
    async def history(
        versions: Annotated[int, Query(ge=1, le=1000)] = 200, verdicts: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> JSONResponse:
        """For curves, oldest first: the newest versions with what their steps measured, and the newest verdicts of
        users as [version that gave the reply, verdict]."""
        rows = []
        for version in await deps.ledger.versions(newest=versions):
            row = version_row(version) | {"metrics": plain(version.report.metrics)}
            del row["report_json"]
            rows.append(row)
        return JSONResponse({"versions": rows, "verdicts": await deps.ledger.user_verdicts(limit=verdicts)})

    @guarded.get("/v1/admin/versions/{weight_version}")
    async def one_version(weight_version: int) -> JSONResponse:
        return JSONResponse(version_row(await known_version(deps.ledger, weight_version)))

    @guarded.get("/v1/turns")
    async def turns(
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        state: TurnState | None = None,
        session_id: str | None = None,
        user: str | None = None,
    ) -> JSONResponse:
        rows = await deps.ledger.turns(limit=limit, state=state, session_id=session_id, user=user)
        return JSONResponse({"turns": [plain(row) for row in rows]})

    @guarded.get("/v1/turns/{turn_id}")
    async def turn(turn_id: str) -> JSONResponse:
        """Why this turn was or was not trained on."""
        record = await deps.ledger.turn(turn_id)
        if record is None:
            raise RequestError(f"no turn {turn_id!r}", status=404, code="turn_not_found")
        return JSONResponse(plain(record))

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
            metrics.render(counts, deps.serving.current, deps.health, problems(deps), deps.children()),
            media_type=metrics.CONTENT_TYPE,
        )

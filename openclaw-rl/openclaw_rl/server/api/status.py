"""Routes that read: `/v1/admin/status`, `history`, `versions`, `/v1/turns*`, `/metrics`, `/openapi.json`."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.errors import LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.ledger import Ledger
from openclaw_rl.practice.status import PracticeStatus
from openclaw_rl.processes.supervisor import ChildStatus
from openclaw_rl.publishing.gate import GateResult
from openclaw_rl.server.api import openapi
from openclaw_rl.server.privacy import Retention
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.telemetry import metrics
from openclaw_rl.telemetry.health import OUT_AFTER, Health
from openclaw_rl.types import HintTerm, Sample, TurnState, Version, VersionState


@dataclass(frozen=True, slots=True)
class Condition:
    """The components that may be out of order, and the version that serves."""

    ledger: Ledger
    serving: VersionAdmission
    health: Health
    retention: Retention
    children: Callable[[], list[ChildStatus]]
    practice: Callable[[], PracticeStatus | None] = lambda: None
    """State of practice; None where the server never practises."""

    def problems(self) -> list[str]:
        """Return one sentence for each part that is out of order; an empty list when all is well."""
        found = []
        if self.ledger.failure:
            found.append(f"ledger: {self.ledger.failure}; replies are served, not recorded")
        if self.retention.is_full:
            found.append("ledger: over retention.max_gb, and all that is left in it still waits")
        if self.ledger.standing_secrets:
            found.append(f"redaction: {self.ledger.standing_secrets}")
        if not self.serving.is_open:
            found.append("engine: not ready; chats are held")
        for child in self.children():
            if child.quick_exits >= OUT_AFTER:
                found.append(
                    f"{child.name}: ended {child.quick_exits} times soon after its start, exit {child.last_exit}"
                )
            elif child.pid is None:
                found.append(f"{child.name}: not running, last exit {child.last_exit}")
        return found + self.health.problems()


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Facts of a server that do not change while it runs."""

    model_name: str
    method: str
    started_at: float
    training: TrainingSettings
    proof_key: str = field(default="", repr=False)
    """Secret of this run, with which `/healthz` answers a challenge."""


async def known_version(ledger: Ledger, weight_version: int) -> Version:
    try:
        return await ledger.version(weight_version)
    except LedgerError as error:
        raise RequestError(str(error), status=404, code="version_not_found") from error


def version_row(version: Version) -> dict[str, Any]:
    """Return a version in the JSON form that operators get."""
    fields = plain(version) | {"state": VersionState(version.state).value, "report_json": version.report.to_json()}
    del fields["report"]
    return fields


def plain(row: object) -> Any:
    """Return dataclasses, enums and messages as JSON values."""
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
        return None  # JSON has no NaN: a log-prob that the engine did not give, a KL that overflowed
    return row


def _practice(status: PracticeStatus | None) -> dict[str, Any] | None:
    """Return the state of practice in the JSON form that operators get."""
    return None if status is None else plain(status) | {"line": status.line()}


def add_status_routes(
    guarded: APIRouter, condition: Condition, info: ServerInfo, last_gate: Callable[[], GateResult | None]
) -> None:
    ledger, health = condition.ledger, condition.health

    @guarded.get("/v1/admin/status")
    async def status() -> JSONResponse:
        versions = await ledger.versions(newest=20)
        return JSONResponse(
            {
                "model": info.model_name,
                "method": info.method,
                "started_at": info.started_at,
                "serving": condition.serving.current,
                "pinned": await ledger.pinned(),
                "tip": (await ledger.tip()).weight_version,
                "learning": await ledger.learning(),
                "training": {"enabled": info.training.enabled, "batch_size": info.training.batch_size},
                "problems": condition.problems(),
                "children": [asdict(child) for child in condition.children()],
                "practice": _practice(condition.practice()),
                "counts": await ledger.counts(),
                "scoring": {
                    "counts": dict(health.counts),
                    "means": {name: plain(mean.value) for name, mean in health.means.items()},
                },
                "last_gate": plain(last_gate()),
                "versions": [version_row(version) for version in versions],
            }
        )

    @guarded.get("/v1/admin/history")
    async def history(
        versions: Annotated[int, Query(ge=1, le=1000)] = 200, verdicts: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> JSONResponse:
        """Return the data of curves, oldest first: the newest versions with the metrics of their steps, and the newest
        verdicts of users as [version that gave the reply, verdict]."""
        rows = []
        for version in await ledger.versions(newest=versions):
            row = version_row(version) | {"metrics": plain(version.report.metrics)}
            del row["report_json"]
            rows.append(row)
        return JSONResponse({"versions": rows, "verdicts": await ledger.user_verdicts(limit=verdicts)})

    @guarded.get("/v1/admin/versions/{weight_version}")
    async def one_version(weight_version: int) -> JSONResponse:
        return JSONResponse(version_row(await known_version(ledger, weight_version)))

    @guarded.get("/v1/turns")
    async def turns(
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        state: TurnState | None = None,
        session_id: str | None = None,
        user: str | None = None,
    ) -> JSONResponse:
        rows = await ledger.turns(limit=limit, state=state, session_id=session_id, user=user)
        return JSONResponse({"turns": [plain(row) for row in rows]})

    @guarded.get("/v1/turns/{turn_id}")
    async def turn(turn_id: str) -> JSONResponse:
        """Return one turn, and why the trainer did or did not learn from it."""
        record = await ledger.turn(turn_id)
        if record is None:
            raise RequestError(f"no turn {turn_id!r}", status=404, code="turn_not_found")
        return JSONResponse(plain(record))

    @guarded.get("/openapi.json", include_in_schema=False)
    async def openapi_document(request: Request) -> JSONResponse:
        return JSONResponse(openapi.document(request.app))

    @guarded.get("/metrics")
    async def prometheus() -> Response:
        """Return the metrics; without the ledger's counts while the ledger cannot be read."""
        try:
            counts = await ledger.counts()
        except LedgerUnavailable:
            counts = {}  # `openclaw_rl_out_of_order` names the ledger all the same
        return PlainTextResponse(
            metrics.render(
                counts,
                condition.serving.current,
                health,
                condition.problems(),
                condition.children(),
                practice={} if (practice := condition.practice()) is None else practice.figures(),
            ),
            media_type=metrics.CONTENT_TYPE,
        )

"""Routes that look: `/v1/admin/status`, `history`, `versions`, `/v1/turns*`, `/metrics`, `/openapi.json`."""

import json
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from openclaw_rl import metrics, openapi
from openclaw_rl.admin.plain import plain, version_row
from openclaw_rl.admin.ports import AdminDeps, known_version, problems
from openclaw_rl.errors import LedgerUnavailable, RequestError
from openclaw_rl.types import TurnState


def add_looks(guarded: APIRouter, deps: AdminDeps) -> None:
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
                    "means": {name: plain(mean.value) for name, mean in deps.meters.means.items()},
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
        rows = [version_row(version) for version in await deps.ledger.versions(newest=versions)]
        for row in rows:
            row["metrics"] = json.loads(row.pop("report_json")).get("metrics", {})
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
            metrics.render(counts, deps.serving.current, deps.meters, problems(deps), deps.children()),
            media_type=metrics.CONTENT_TYPE,
        )

"""Routes that read: `/v1/admin/status`, `history`, `versions`, `/metrics`, `/openapi.json`."""

import asyncio
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.pool_member import EngineStatus
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
from openclaw_rl.types import SHARED_POLICY, HintTerm, Sample, TurnState, Version, VersionState

_EPISODES = 2000
"""Newest episodes whose outcomes the curves show."""
_MOST_NAMED = 10
"""Policies that an error names."""


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
    trainer_age_s: Callable[[], float] = lambda: math.inf
    """Seconds since the trainer last called; infinite: it never did."""
    data_dir: Path | None = None
    engines: Callable[[], list[EngineStatus]] = list
    """Engines of a pool; empty for one engine."""
    tracked: Callable[[], dict[str, int]] = dict
    """The newest version that each tracker has taken."""

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
        for number, engine in enumerate(self.engines(), 1):
            if engine.fault is not None:
                found.append(f"engine {number}: {engine.fault}")
        drained = {engine.name for engine in self.engines() if engine.is_drained}
        for child in self.children():
            if child.name in drained:
                continue
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
    engine: str = ""
    """Kind of the engine."""
    judge: str = ""
    """Kind of the judge."""
    trainer: str = ""
    """Kind of the trainer."""


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


def _disk(folder: Path | None) -> dict[str, int] | None:
    """Return the bytes of the data directory's disk, and of the ledger. Blocks."""
    if folder is None:
        return None
    try:
        usage = shutil.disk_usage(folder)
        ledger = sum(file.stat().st_size for file in folder.glob("ledger.sqlite3*"))
    except OSError:
        return None  # a broken disk is told by the parts that write
    return {"free": usage.free, "total": usage.total, "ledger": ledger}


async def _newest_step(ledger: Ledger) -> metrics.StepFigures | None:
    """Return the newest version's figures; None before the first step."""
    for version in await ledger.versions(since=1, newest=1):
        figures = dict(version.report.metrics)
        for made in await ledger.step_makeup([version.weight_version]):
            figures |= {"batch_samples": made.samples, "practice_samples": made.practice, "version_lag": made.lag}
        return metrics.StepFigures(version.weight_version, version.committed_at, figures)
    return None


def _practice(status: PracticeStatus | None) -> dict[str, Any] | None:
    """Return the state of practice in the JSON form that operators get."""
    return None if status is None else plain(status) | {"line": status.line()}


async def known_policy(ledger: Ledger, policy: str | None) -> str:
    """Return the policy that an operator names; None: the shared one. Raises RequestError (404)."""
    if policy is None or policy == SHARED_POLICY:
        return SHARED_POLICY
    known = await ledger.policies()
    if policy not in known:
        named = ", ".join(known[:_MOST_NAMED]) + (", …" if len(known) > _MOST_NAMED else "")
        said = f"there is no policy {policy[:100]!r}; this server has {named}"
        raise RequestError(said, status=404, code="policy_not_found", param="policy")
    return policy


PolicyQuery = Annotated[str | None, Query(max_length=200)]
"""A policy, as `/v1/admin/policies` names it; None: the shared one."""


def add_status_routes(
    guarded: APIRouter, condition: Condition, info: ServerInfo, last_gate: Callable[[str], GateResult | None]
) -> None:
    ledger, health = condition.ledger, condition.health

    @guarded.get("/v1/admin/status")
    async def status(policy: PolicyQuery = None) -> JSONResponse:
        """Return the state of the server, and of one policy: what serves, its gate and its newest versions."""
        name = await known_policy(ledger, policy)
        counts, figures, policies = await ledger.counts(), await ledger.policy_figures(name), await ledger.policies()
        serving = condition.serving.currents.get(name)
        return JSONResponse(
            {
                "model": info.model_name,
                "method": info.method,
                "started_at": info.started_at,
                "policy": name,
                "policies": len(policies),
                "serving": (await ledger.target(name)).weight_version if serving is None else serving,
                "pinned": figures.pinned,
                "tip": figures.tip,
                "learning": figures.learning,
                "waiting": counts[TurnState.SAMPLED] if len(policies) == 1 else figures.waiting,
                "training": {"enabled": info.training.enabled, "batch_size": info.training.batch_size},
                "problems": condition.problems(),
                "children": [asdict(child) for child in condition.children()],
                "engine": {"kind": info.engine, "is_open": condition.serving.is_open},
                "engines": [asdict(engine) for engine in condition.engines()],
                "judge": {"kind": info.judge},
                "trainer": {"kind": info.trainer, "last_call_s": plain(condition.trainer_age_s())},
                "disk": await asyncio.to_thread(_disk, condition.data_dir),
                "practice": _practice(condition.practice()),
                "counts": counts,
                "scoring": {
                    "counts": dict(health.counts),
                    "means": {name: plain(mean.value) for name, mean in health.means.items()},
                },
                "last_gate": plain(last_gate(name)),
                "versions": [version_row(version) for version in await ledger.versions(newest=20, policy=name)],
            }
        )

    @guarded.get("/v1/admin/history")
    async def history(
        versions: Annotated[int, Query(ge=1, le=1000)] = 200,
        verdicts: Annotated[int, Query(ge=1, le=10_000)] = 1000,
        policy: PolicyQuery = None,
    ) -> JSONResponse:
        """Return the data of a policy's curves, oldest first: the newest versions with the metrics of their steps and
        the make-up of their batches, the newest verdicts of users as [version that gave the reply, verdict], the newest
        times to a first token as [time, version, seconds], and the outcomes of the newest episodes by version, split
        and tasks. Episodes and, without a policy, first tokens are the whole server's."""
        name = await known_policy(ledger, policy)
        newest = await ledger.versions(newest=versions, policy=name)
        numbers = [version.weight_version for version in newest]
        makeup = await ledger.step_makeup(numbers)
        batches = {step.weight_version: plain(step) for step in makeup}
        rows = []
        for version in newest:
            row = version_row(version) | {"metrics": plain(version.report.metrics)}
            del row["report_json"]
            rows.append(row | {"batch": batches.get(version.weight_version)})
        return JSONResponse(
            {
                "policy": name,
                "versions": rows,
                "verdicts": await ledger.user_verdicts(limit=verdicts, policy=name),
                "first_tokens": [one for one in health.first_tokens if policy is None or one[1] in numbers],
                "episodes": [plain(tally) for tally in await ledger.tally(newest=_EPISODES)],
            }
        )

    @guarded.get("/v1/admin/versions/{weight_version}")
    async def one_version(weight_version: int) -> JSONResponse:
        """Return one version, of whichever policy."""
        return JSONResponse(version_row(await known_version(ledger, weight_version)))

    @guarded.get("/openapi.json", include_in_schema=False)
    async def openapi_document(request: Request) -> JSONResponse:
        return JSONResponse(openapi.document(request.app))

    @guarded.get("/metrics")
    async def prometheus() -> Response:
        """Return the metrics; without those of the ledger while it cannot be read."""
        try:
            counts, step = await ledger.counts(), await _newest_step(ledger)
        except LedgerUnavailable:
            counts, step = {}, None  # `openclaw_rl_out_of_order` names the ledger all the same
        return PlainTextResponse(
            metrics.render(
                counts,
                condition.serving.current,
                health,
                condition.problems(),
                condition.children(),
                practice={} if (practice := condition.practice()) is None else practice.figures(),
                training=metrics.Training(step, condition.tracked()),
                engines=condition.engines(),
            ),
            media_type=metrics.CONTENT_TYPE,
        )

"""The trainer API over HTTP: `/v1/trainer/*`, with the bodies of `trainer_protocol`, on top of the ledger.

The last four routes (`start`, `leased`, `push/begin`, `push/end`) serve a trainer of full weights, which checkpoints
only now and then.

Promises:

* The token is compared in constant time before the body is read; bodies are parsed off the event loop.
* Errors are `{"error": {"message", "type", "code", "param"}}`: 401 without the token; 409 when the ledger refuses, and
  the trainer must discard its step; 413 and 422 for a bad body; 503 with Retry-After while the ledger cannot be
  written.
* A lease call waits until a batch is due, its time is up, its client has gone or the server stops. A batch granted to a
  client that has gone is released at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from openclaw_rl.errors import CommitRefused, LedgerError, LedgerUnavailable
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing.weight_push import TrainerPushes
from openclaw_rl.telemetry.alerts import Alert
from openclaw_rl.telemetry.health import Health
from openclaw_rl.trainer_protocol import (
    GAP_ALERT,
    Commit,
    Committed,
    Durable,
    Failed,
    LeaseBody,
    Leased,
    LeaseRef,
    LeaseReply,
    LeaseRequest,
    PushBegin,
    PushEnd,
    Release,
    Renewed,
    Start,
    Started,
    Tip,
    TipRequest,
)
from openclaw_rl.types import DropReason, Lease
from openclaw_rl.web.auth import Secret
from openclaw_rl.web.bodies import place_name

log = structlog.get_logger()

Body = TypeVar("Body", bound=BaseModel)

TRAINER = "trainer"
"""Name of the part in `Health` that is out of order while steps fail."""
GAP = "log-probs"
"""Name of the part in `Health` that is out of order while engine and trainer compute different log-probs."""

DRIVER = "driver"
"""Name of the part that is out of order while an external trainer ends again and again before it asks for a batch."""

_MAX_BODY = 64 << 20
# A smaller batch becomes due by time alone, and no new sample wakes the waiting lease call then.
_ASK_AGAIN_S = 5.0


class LeaseWait:
    """Condition on which lease calls wait: new samples, `train --now` (a batch of any size), or the server's stop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.on_granted: Callable[[], None] = lambda: None
        """Called with every lease that a trainer gets."""
        self.is_closed = False
        self.takes_any = False
        """The next batch may be of any size."""

    def samples_came(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def train_now(self) -> None:
        self.takes_any = True
        self.samples_came()

    async def follow(self, sampled: asyncio.Event) -> None:
        """Wake the waiting calls whenever `sampled` is set, forever. The server's task group owns this task."""
        while True:
            await sampled.wait()
            sampled.clear()
            self.samples_came()

    def close(self) -> None:
        """Answer every waiting call, and every later one, without a lease."""
        self.is_closed = True
        self.samples_came()

    def next_change(self) -> asyncio.Event:
        """Return the event that the next change sets. Take it before the ledger is asked, and no change is missed."""
        return self._changed


def build_trainer_router(
    ledger: Ledger,
    *,
    token: str,
    lease_wait: LeaseWait,
    on_commit: Callable[[int], None],
    describe: Callable[[Tip], Awaitable[Tip]] | None = None,
    health: Health | None = None,
    on_word: Callable[[], None] = lambda: None,
    alert: Alert = lambda event, **fields: None,
) -> APIRouter:
    """Return the routes of every trainer. Raises ValueError for an empty token.

    on_commit: called with every committed version, again when a trainer repeats a commit, and when a version is on
    disk. describe: adds the engine's facts to a tip. health: learns whether steps succeed, how long they take, and
    whether checkpoints can be kept. on_word: called at every request that has the token. alert: raised when steps or
    starts fail again and again, and when engine and trainer are far apart.
    """
    if not token:
        raise ValueError("an empty trainer token would let every client train")
    health = health or Health()
    gaps = GapMonitor(health, alert)
    router = APIRouter(prefix="/v1/trainer", route_class=guarded_by(token, on_word), include_in_schema=False)

    newest = 0

    @router.post("/tip")
    async def tip(request: Request) -> Tip:
        asked = await parse(request, TipRequest)
        found = await ledger.tip(asked.policy)
        return found if describe is None else await describe(found)

    @router.post("/lease")
    async def lease(request: Request) -> Response:
        asked = await parse(request, LeaseRequest)
        health.ok(DRIVER)  # its start is over
        granted = await _wait_for_lease(ledger, asked, lease_wait, gone=request.receive)
        if granted is not None:
            lease_wait.on_granted()
        return await answer_lease(granted)

    @router.post("/renew")
    async def renew(request: Request) -> Renewed:
        ref = await parse(request, LeaseRef)
        renew = ledger.begin_step if ref.begins_step else ledger.renew
        return Renewed(expires_at=await renew(ref.lease_id, ref.fence))

    @router.post("/release")
    async def release(request: Request) -> dict[str, str]:
        body = await parse(request, Release)
        try:
            drop = {sample_id: DropReason(reason) for sample_id, reason in body.drop.items()}
        except ValueError as error:
            raise _Refused(422, "invalid_body", f"drop: {error}", "drop") from error
        await ledger.release(body.lease_id, body.fence, reason=body.reason, drop=drop)
        lease_wait.samples_came()
        return {}

    @router.post("/commit")
    async def commit(request: Request) -> Committed:
        body = await parse(request, Commit)
        weight_version = await ledger.commit(body)
        health.ok(TRAINER)
        nonlocal newest
        if weight_version > newest:  # not a commit that the trainer repeats, because it missed the answer
            newest = weight_version
            observe_step(health, body.report.metrics)
            gaps.observe(body.report.metrics, version=body.parent)
        on_commit(weight_version)
        return Committed(weight_version=weight_version)

    @router.post("/durable")
    async def durable(request: Request) -> dict[str, str]:
        said = await parse(request, Durable)
        if said.failure is None:
            await ledger.durable(said.weight_version)
            health.ok("checkpoints")
            on_commit(said.weight_version)  # an engine without this version can take it from the disk
        else:  # at once: what was learned since the last checkpoint exists in one process only
            health.failed("checkpoints", f"the trainer cannot keep checkpoints: {said.failure}", at_once=True)
        return {}

    @router.post("/failed")
    async def failed(request: Request) -> dict[str, str]:
        said = await parse(request, Failed)
        part = DRIVER if said.has_ended else TRAINER
        was_failing = health.is_failing(part)
        health.failed(part, said.reason, at_once=said.cannot_start)
        if health.is_failing(part) and not was_failing:
            # Without the reason, which is text of a log: an alert leaves the host.
            alert("trainer_fails", part=part, failures=health.failures[part])
        return {}

    return router


def observe_step(health: Health, metrics: Mapping[str, float]) -> None:
    """Count the duration of a step, where its trainer reports one: `step_s`, or the local trainer's two parts of it."""
    parts = [metrics[name] for name in ("gradient_s", "optimizer_s") if name in metrics]
    if "step_s" in metrics or parts:
        health.step.observe(metrics.get("step_s", sum(parts)))


class GapMonitor:
    """Monitor of the distance between the log-probs of engine and trainer, which every trainer reports with a step."""

    def __init__(self, health: Health, alert: Alert) -> None:
        self._health, self._alert = health, alert

    def observe(self, metrics: Mapping[str, float], *, version: int) -> None:
        """Put the part out of order while the step's distance is too large; alert once. version: the step's parent."""
        gap = metrics.get("fresh_abs_log_ratio")
        if gap is None:  # no token of this step was sampled by the version that it started from
            return
        if gap <= GAP_ALERT:
            self._health.ok(GAP)
            return
        if not self._health.is_failing(GAP):
            self._alert("log_probs_differ", version=version, nats_per_token=gap, limit=GAP_ALERT)
        apart = f"engine and trainer differ by {gap:.3g} nats a token on the replies of version {version}"
        self._health.failed(GAP, f"{apart}: they compute different models", at_once=True)


async def _wait_for_lease(
    ledger: Ledger, asked: LeaseRequest, lease_wait: LeaseWait, *, gone: Callable[[], Awaitable[Any]]
) -> Lease | None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + asked.wait_s
    disconnect = asyncio.create_task(_disconnected(gone))
    try:
        while not lease_wait.is_closed and not disconnect.done():
            changed = lease_wait.next_change()
            lease = await _ask(ledger, asked, lease_wait)
            if lease is not None and disconnect.done():
                await ledger.release(lease.lease_id, lease.fence, reason="the trainer was gone before it came")
                return None
            if lease is not None or (left_s := deadline - loop.time()) <= 0:
                return lease
            await _first_of(changed, disconnect, timeout_s=min(left_s, _ASK_AGAIN_S))
        return None
    finally:
        disconnect.cancel()


async def _first_of(changed: asyncio.Event, disconnect: "asyncio.Task[None]", *, timeout_s: float) -> None:
    change = asyncio.create_task(changed.wait())
    try:
        await asyncio.wait((change, disconnect), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        change.cancel()


async def _ask(ledger: Ledger, asked: LeaseRequest, lease_wait: LeaseWait) -> Lease | None:
    takes_any = lease_wait.takes_any
    lease = await ledger.lease(trainer=asked.trainer, n=asked.n, now=takes_any, most=asked.most)
    if takes_any and (lease is not None or not (await ledger.counts())["sampled"]):
        lease_wait.takes_any = False  # granted, or no sample waits: a later sample must fill a batch again
    return lease


async def _disconnected(gone: Callable[[], Awaitable[Any]]) -> None:
    while (await gone())["type"] != "http.disconnect":
        pass


async def answer_lease(lease: Lease | None) -> Response:
    """Return the lease as JSON."""
    # In a thread: a batch is large.
    return Response(await asyncio.to_thread(_lease_json, lease), media_type="application/json")


def _lease_json(lease: Lease | None) -> bytes:
    return LeaseReply(lease=None if lease is None else LeaseBody.of(lease)).model_dump_json().encode()


async def parse(request: Request, model: type[Body]) -> Body:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BODY:
            raise _Refused(413, "body_too_large", f"a body may have {_MAX_BODY} bytes")
    try:
        return await asyncio.to_thread(model.model_validate_json, bytes(content) or b"{}")
    except ValidationError as error:
        problems = [(place_name(problem["loc"]), problem["msg"]) for problem in error.errors()]
        said = "; ".join(f"{place or 'body'}: {what}" for place, what in problems)
        first = problems[0][0]
        raise _Refused(422, "invalid_body" if first else "invalid_json", said, first or None) from error


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def guarded_by(token: str, on_word: Callable[[], None] = lambda: None) -> type[APIRoute]:
    """Return routes that check the token first and answer every error in one form. on_word: as for the router."""
    secret = Secret(token)

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                if not secret.opens(request.headers.get("authorization")):
                    return _error(401, "unauthorized", "a trainer sends `Authorization: Bearer <trainer token>`")
                on_word()
                try:
                    return await handler(request)
                except _Refused as error:
                    return _error(error.status, error.code, str(error), error.param)
                except CommitRefused as error:
                    return _error(409, "refused", str(error))
                except LedgerUnavailable as error:
                    return _error(503, "ledger_unavailable", str(error))
                except LedgerError as error:
                    return _error(409, "refused", str(error))
                except ClientDisconnect:  # the trainer was killed during its request: no client reads this
                    return Response(status_code=499)

            return guarded

    return GuardedRoute


def _error(status: int, code: str, message: str, param: str | None = None) -> JSONResponse:
    headers = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}.get(status)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": code, "param": param}}, status, headers)


def build_push_router(
    ledger: Ledger, *, token: str, pushes: TrainerPushes, on_start: Callable[[Start], Awaitable[Started]]
) -> APIRouter:
    """Return the routes of a trainer of full weights.

    on_start: called with the words of a trainer that has just started, and holds no weights in memory.
    """
    router = APIRouter(prefix="/v1/trainer", route_class=guarded_by(token), include_in_schema=False)

    @router.post("/start")
    async def start(request: Request) -> Started:
        return await on_start(await parse(request, Start))

    @router.post("/leased")
    async def leased(request: Request) -> Response:
        return await answer_lease(await ledger.leased((await parse(request, Leased)).fence))

    @router.post("/push/begin")
    async def begin(request: Request) -> dict[str, str]:
        await pushes.begin(await parse(request, PushBegin))
        return {}

    @router.post("/push/end")
    async def end(request: Request) -> dict[str, str]:
        await pushes.end(await parse(request, PushEnd))
        return {}

    return router

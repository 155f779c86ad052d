"""Routes of the operator: `/healthz`, `/v1/admin/*`, and through `status` `/metrics`.

This module holds the routes that change the server: roll back, pin, pause learning, train, forget, drain an engine.
`/healthz` answers
every client with one word, and with the admin key also lists the problems. Every other route needs the admin key, which
is compared in constant time. No answer holds a secret.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from openclaw_rl.data_dir import proof_of
from openclaw_rl.engines.pool_drains import EngineDrains
from openclaw_rl.errors import LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.server.api.compare import Comparison, add_compare_route
from openclaw_rl.server.api.policies import Body, Learning, Pin, Rollback, Steering, add_policies_route
from openclaw_rl.server.api.status import Condition, ServerInfo, add_status_routes, known_policy, plain
from openclaw_rl.server.api.users import UsersDeps, add_users_routes
from openclaw_rl.server.privacy import Forgetting
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.types import TurnState
from openclaw_rl.web.auth import Secret


class _OfPolicy(Body):
    policy: str | None = Field(default=None, max_length=200)
    """Policy to act on, as `/v1/admin/policies` names it; None: that of the version, else the shared one."""


class PolicyRollback(Rollback, _OfPolicy):
    """Rollback of one policy."""


class PolicyPin(Pin, _OfPolicy):
    """Pin of one policy."""


class PolicyLearning(Learning, _OfPolicy):
    """Switch of one policy's learning; that of the shared policy is everyone's."""


class EngineChange(Body):
    """Change of one engine of a pool."""

    drained: bool
    """True: it finishes what runs and gets no more requests. False: it comes back."""


class Forget(Body):
    """Request to forget one of `session_id`, `turn_id` and `everything` (with `user`)."""

    session_id: str | None = Field(default=None, min_length=1)
    turn_id: str | None = Field(default=None, min_length=1)
    """A reply of the session to forget; of the conversation, where the client named no session."""
    user: str | None = Field(default=None, min_length=1)
    """Owner of the session; needed when several users have a session of this name."""
    everything: bool = False
    """Forget every turn of `user`."""
    rebuild: bool = False
    """Roll back to the version before the forgotten turns were trained on, and learn again from the rest."""

    def check(self) -> None:
        """Raise RequestError unless it names one thing to forget."""
        if (self.session_id is not None) + (self.turn_id is not None) + self.everything != 1:
            raise _refusal("session_id", "one of session_id, turn_id and everything is needed")
        if self.everything and self.user is None:
            raise _refusal("user", "everything needs the user")
        if self.turn_id is not None and self.user is not None:
            raise _refusal("user", "a turn has its user")


def _refusal(field: str, reason: str) -> RequestError:
    return RequestError(f"{field}: {reason}", status=422, code="invalid_body", param=field)


@dataclass(frozen=True, slots=True)
class Controls:
    """The components that the operator steers."""

    ledger: Ledger
    publisher: Publisher
    forgetting: Forgetting
    train_now: Callable[[], None]
    training: TrainingSettings
    comparison: Comparison | None = None
    """None: versions cannot be compared."""
    users: UsersDeps | None = None
    """None: no list of users."""
    drains: EngineDrains | None = None
    """None: the server has one engine."""


def add_control_routes(guarded: APIRouter, controls: Controls) -> None:
    ledger = controls.ledger
    steering = Steering(ledger, controls.publisher, controls.training)

    async def named(body: _OfPolicy) -> str | None:
        return None if body.policy is None else await known_policy(ledger, body.policy)

    @guarded.post("/v1/admin/rollback")
    async def rollback(body: PolicyRollback) -> JSONResponse:
        return JSONResponse(await steering.roll_back(await named(body), body))

    @guarded.post("/v1/admin/pin")
    async def pin(body: PolicyPin) -> JSONResponse:
        return JSONResponse(await steering.pin(await named(body), body.weight_version))

    @guarded.post("/v1/admin/learning")
    async def learning(body: PolicyLearning) -> JSONResponse:
        """Pause or resume learning of a policy; without a policy, of everyone."""
        return JSONResponse(await steering.set_learning(await known_policy(ledger, body.policy), body.on))

    @guarded.post("/v1/admin/train")
    async def train() -> JSONResponse:
        """Let the trainer lease the waiting samples as one batch of any size; not while learning is paused or off."""
        waiting = (await ledger.counts()).get(TurnState.SAMPLED, 0)
        learning = await ledger.learning()
        if learning and controls.training.enabled:
            controls.train_now()
        return JSONResponse({"waiting": waiting, "learning": learning, "enabled": controls.training.enabled})

    @guarded.post("/v1/admin/forget")
    async def forget(body: Forget) -> JSONResponse:
        """Delete a session, a conversation or a user; no list and no batch holds their turns afterwards.

        The turns stay forgotten when the policy cannot be rebuilt: `not_rebuilt` then holds the reason."""
        body.check()
        forgetting = controls.forgetting
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


def add_engine_routes(guarded: APIRouter, condition: Condition, drains: EngineDrains | None) -> None:
    @guarded.get("/v1/admin/engines")
    async def engines() -> JSONResponse:
        """Return the engines of a pool, in the order of their numbers; of one engine alone, an empty list."""
        return JSONResponse({"engines": [plain(engine) for engine in condition.engines()]})

    @guarded.post("/v1/admin/engines/{number}")
    async def change_engine(number: int, body: EngineChange) -> JSONResponse:
        """Drain an engine of a pool, or let it come back; return its state. The last one that serves stays (409)."""
        if drains is None:
            said = "this server has one engine, which cannot be drained (engine.urls and engine.replicas make a pool)"
            raise RequestError(said, status=409, code="no_pool")
        return JSONResponse(plain(await drains.set(number, body.drained)))


def build_admin_router(admin_key: str, condition: Condition, info: ServerInfo, controls: Controls) -> APIRouter:
    router = APIRouter()
    key = Secret(admin_key)

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
        """Return `ok`, or `degraded` while a part is out of order; with the admin key also which part, and why.

        A degraded server still takes chats: it holds them while the engine is away. The header `X-OpenClaw-Challenge`
        gets its proof in `X-OpenClaw-Proof`: only the server of the data directory can make it."""
        found = condition.problems()
        body: dict[str, Any] = {
            "status": "degraded" if found else "ok",
            "weight_version": condition.serving.current,
        }
        if is_admin(request):
            body["problems"] = found
        challenge = request.headers.get("x-openclaw-challenge")
        headers = {} if challenge is None else {"x-openclaw-proof": proof_of(info.proof_key, challenge[:200])}
        return JSONResponse(body, headers=headers)

    add_status_routes(guarded, condition, info, last_gate=lambda policy: controls.publisher.last_gate_of(policy))
    add_policies_route(guarded, controls.ledger)
    add_control_routes(guarded, controls)
    add_engine_routes(guarded, condition, controls.drains)
    if controls.comparison is not None:
        add_compare_route(guarded, controls.comparison)
    if controls.users is not None:
        add_users_routes(guarded, controls.users)
    router.include_router(guarded)
    return router

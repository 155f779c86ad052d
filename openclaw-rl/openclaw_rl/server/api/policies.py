"""The learning of one policy, to look at and to steer: `/v1/policy*` for its user, and the acts of the operator.

With `policies.mode = "per_user"` a chat key steers the policy of its own user: it rolls back, pins and pauses what
learned from that user alone. Any other policy, and each version of it, does not exist for the key. Where one policy
learns from all, no chat key steers it.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from openclaw_rl.errors import RequestError
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.server.api.status import known_version, plain, version_row
from openclaw_rl.settings import PoliciesSettings, TrainingSettings
from openclaw_rl.types import SHARED_POLICY, Version
from openclaw_rl.web.auth import Keys

_NEWEST = 20
"""Versions that a user's answer lists."""
_OPERATORS = ("folder", "sha256", "weights_file", "lease_id", "base_hash", "report_json")
"""Fields of a version that its user does not get: paths, and the trainer's own."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Rollback(Body):
    to: int | None = Field(default=None, ge=0)
    """Version to go back to; None: the newest one before the version that serves whose weights exist."""
    requeue: bool = False
    """Let the samples of the abandoned versions wait for a batch again."""


class Pin(Body):
    weight_version: int | None = Field(ge=0)
    """Version to serve while no other is published; None unpins."""


class Learning(Body):
    on: bool


@dataclass(frozen=True, slots=True)
class Steering:
    """Acts on one policy, whoever asks. Every act raises LedgerError, EngineError and RequestError."""

    ledger: Ledger
    publisher: Publisher
    training: TrainingSettings

    async def version_of(self, policy: str | None, number: int) -> Version:
        """Return a version of this policy; None: of any. Raises RequestError (404)."""
        found = await known_version(self.ledger, number)
        if policy not in (None, found.policy):
            raise RequestError(f"no version {number}", status=404, code="version_not_found")
        return found

    async def roll_back(self, policy: str | None, asked: Rollback) -> dict[str, Any]:
        """policy: None: that of the version to go back to, else the shared one."""
        to = asked.to
        if to is None:
            policy = policy or SHARED_POLICY
            serving = await self.ledger.version(await self.ledger.serving_version(policy))
            if serving.parent is None:
                said = "the first version of the policy" if policy != SHARED_POLICY else "the base"
                raise RequestError(
                    f"{said} serves: there is nothing to go back to", status=409, code="nothing_to_roll_back"
                )
            to = await self.ledger.way_back(serving.parent)
        policy = (await self.version_of(policy, to)).policy
        await self.ledger.rollback(to, requeue=asked.requeue)
        await self.publisher.follow()
        return {"policy": policy, "serving": await self._serving(policy)}

    async def pin(self, policy: str | None, number: int | None) -> dict[str, Any]:
        """number: None unpins. policy: as for `roll_back`."""
        if number is not None:
            policy = (await self.version_of(policy, number)).policy
        policy = policy or SHARED_POLICY
        await self.publisher.pin(number, policy)
        return {"policy": policy, "pinned": number, "serving": await self._serving(policy)}

    async def set_learning(self, policy: str, on: bool) -> dict[str, Any]:
        """Pause or resume a policy: the shared one's switch is everyone's. `learning` is what holds then."""
        await self.ledger.set_learning(on, policy)
        return {"policy": policy, "learning": await self.ledger.learning(policy), "enabled": self.training.enabled}

    async def _serving(self, policy: str) -> int:
        return (await self.ledger.target(policy)).weight_version


def add_policies_route(guarded: APIRouter, ledger: Ledger) -> None:
    @guarded.get("/v1/admin/policies")
    async def policies() -> JSONResponse:
        """Return each policy in numbers, by name: its serving, pinned and newest version, and the samples that wait."""
        return JSONResponse({"policies": [plain(row) for row in await ledger.all_policy_figures()]})


def build_own_policy_router(steering: Steering, keys: Keys, settings: PoliciesSettings) -> APIRouter:
    router, ledger = APIRouter(), steering.ledger

    async def own(request: Request) -> str:
        """Return the policy of the key's user. Raises RequestError where there is none to steer."""
        user = keys.caller(request.headers.get("authorization")).user
        if not settings.is_per_user:
            raise RequestError(
                "one policy learns from all users of this server: its operator steers it (the admin key)",
                status=409,
                code="shared_policy",
            )
        policy = settings.of(user)
        if not await ledger.targets([policy]):
            raise RequestError("your policy begins with your first chat", status=404, code="policy_not_found")
        return policy

    Own = Annotated[str, Depends(own)]

    @router.get("/v1/policy")
    async def policy(policy: Own) -> JSONResponse:
        """Return the state of the own policy, and its newest versions, oldest first."""
        found = await ledger.policy_figures(policy)
        versions = [_row(version) for version in await ledger.versions(newest=_NEWEST, policy=policy)]
        training = {"enabled": steering.training.enabled, "batch_size": steering.training.batch_size}
        return JSONResponse(plain(found) | {"training": training, "versions": versions})

    @router.post("/v1/policy/rollback")
    async def rollback(policy: Own, body: Rollback) -> JSONResponse:
        """Go back to an earlier version of the own policy; the versions after it are abandoned."""
        return JSONResponse(await steering.roll_back(policy, body))

    @router.post("/v1/policy/pin")
    async def pin(policy: Own, body: Pin) -> JSONResponse:
        """Keep one version of the own policy serving, or publish new ones again."""
        return JSONResponse(await steering.pin(policy, body.weight_version))

    @router.post("/v1/policy/learning")
    async def learning(policy: Own, body: Learning) -> JSONResponse:
        """Pause or resume learning of the own policy. `learning` stays false while the operator has paused everyone."""
        return JSONResponse(await steering.set_learning(policy, body.on))

    return router


def _row(version: Version) -> dict[str, Any]:
    row = version_row(version) | {"metrics": plain(version.report.metrics)}
    return {name: value for name, value in row.items() if name not in _OPERATORS}

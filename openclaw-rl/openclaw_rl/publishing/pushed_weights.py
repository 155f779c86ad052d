"""Versions that are on no disk: their trainer sends them to the engine itself, and says when (slime's driver does).

Whether one may serve is decided before anything is sent, for nothing of the old weights is left behind a push: the
gate's figures, and that the engine has numbers at all. What fails once the new weights are there shuts the gate, and
the keeper restores what should serve.

Leaves to others: the two calls of a push and its deadline (`trainers.pushes`), the swap itself (`full_weights`).
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

import structlog

from openclaw_rl.alerts import Alert
from openclaw_rl.errors import CommitRefused
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing import version_states
from openclaw_rl.publishing.gate import Gate
from openclaw_rl.publishing.policy_engine import PolicyEngine
from openclaw_rl.publishing.version_folders import is_elsewhere
from openclaw_rl.trainers.api import Report, Tip
from openclaw_rl.types import VersionState

log = structlog.get_logger()


class PushedWeights:
    def __init__(self, ledger: Ledger, policy: PolicyEngine, gate: Gate, turn: asyncio.Lock, *, alert: Alert) -> None:
        """turn: the publisher's. One swap at a time."""
        self._ledger, self._policy, self._gate, self._turn, self._alert = ledger, policy, gate, turn, alert

    async def describe(self, tip: Tip) -> Tip:
        """Whether its trainer should send it to the engine, and which engine that is."""
        version = await self._ledger.version(tip.weight_version)
        is_missing = self._policy.missed == version.weight_version or version.state is not VersionState.SERVING
        wants = is_elsewhere(version) and is_missing
        wants = wants and await self._ledger.pinned() in (None, version.weight_version)
        return tip.model_copy(update={"wants_push": wants, "engine": self._policy.name})

    async def take(self, weight_version: int, transfer: Callable[[], Awaitable[None]]) -> None:
        """Serve the tip with the weights that its trainer sends to the engine while `transfer` runs; what serves may be
        sent again. Raises CommitRefused when it may not serve, EngineError when it does not. What broke off on the way
        leaves the gate shut until the keeper has restored what should serve.
        """
        async with self._turn:
            version = await self._ledger.version(weight_version)
            if (tip := (await self._ledger.tip()).weight_version) != weight_version:
                raise CommitRefused(f"version {weight_version} is not the tip, {tip} is")
            if (pinned := await self._ledger.pinned()) not in (None, weight_version):
                raise CommitRefused(f"version {pinned} is pinned")
            await self._policy.check_is_the_same()
            report = Report.model_validate(json.loads(version.report_json))
            if version.state is VersionState.CANDIDATE:
                refusal = (await self._gate.check(version, report)).refusal
                if refusal is not None:
                    await version_states.reject(self._ledger, weight_version, refusal, alert=self._alert)
                    raise CommitRefused(refusal)
            await version_states.to_loading(self._ledger, version)
            await self._gate.needs_numbers(report.probes)
            await self._policy.receive(weight_version, transfer)
            refusal = await self._gate.self_test(weight_version, report.probes)
            if refusal is not None:
                self._policy.distrust()
                if version.state is not VersionState.SERVING:
                    await version_states.reject(self._ledger, weight_version, refusal, alert=self._alert)
                raise CommitRefused(refusal)
            await self._ledger.set_version_state(weight_version, VersionState.SERVING)
            older = [version.weight_version for version in await self._ledger.unfinished_versions()]
            await version_states.supersede(self._ledger, [number for number in older if number < weight_version])
            log.info("published", weight_version=weight_version, parent=version.parent)

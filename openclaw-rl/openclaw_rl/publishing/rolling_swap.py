"""Swap of full weights through a pool, engine by engine: no chat is held while two engines serve.

    first half: set aside → empty → push → back    (the other half serves the old version)
    switch: new requests take the new version, which the first half holds
    second half: the same                          (the first half serves the new version)

A request goes to an engine that holds its version (`engines.pool`). A reply that is cut in the first half goes on under
the old version on the other half; one that is cut in the second half goes on under the new version.

Promises:

- An engine that dies or hangs in its turn leaves the pool, and the others go on, even if all of the first half have
  left. It comes back with the weights that serve then.
- Before the switch a refused push leaves the old version serving, on engines that hold it. After it, the new version
  serves, and the engine that refused is out of the pool.

A pool of one engine, one whose engines do not all hold the serving version, and one whose chats are held already swap
as one (`full_swap`).
"""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path

import structlog

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.engines.pool_member import Member, Weights
from openclaw_rl.errors import EngineGone, EngineRefused
from openclaw_rl.publishing.full_swap import FullWeightSwap, SwapTimes, cut, in_time
from openclaw_rl.settings import PublisherSettings

log = structlog.get_logger()

_LOOK_S = 0.01


class RollingSwap:
    def __init__(
        self, pool: PooledEngine, as_one: FullWeightSwap, serving: VersionAdmission, settings: PublisherSettings
    ) -> None:
        self._pool, self._as_one, self._serving, self._settings = pool, as_one, serving, settings

    async def swap(self, weight_version: int, folder: Path) -> SwapTimes:
        """Push the weights of `folder` and switch to their version.

        Raises EngineError. The old version then serves, or chats are held until `EngineReadiness` restores it.
        """
        async with self._pool.rolling():
            members, current = self._pool.members, self._serving.current
            is_level = all(member.weight_version == current for member in members)
            held = self._pool.weights
            if not members and held is not None and held.folder is None:
                self._pool.hold(Weights(folder, weight_version))  # of the others, only the trainer could have sent any
            while len(members) >= 2 and self._serving.is_open and is_level:
                if (times := await self._rolled(members, Weights(folder, weight_version))) is not None:
                    return times
                members = self._pool.members  # fewer each time: no engine comes in meanwhile
        return await self._as_one.swap(weight_version, folder)

    async def _rolled(self, members: list[Member], weights: Weights) -> SwapTimes | None:
        """Give the weights to one half and then to the other. Return None if all of the first half have left."""
        weight_version = weights.weight_version
        first, second = members[: len(members) // 2], members[len(members) // 2 :]
        taken, spent = list[Member](), _Spent()
        try:
            for member in first:
                if await self._turn(member, weights, spent):
                    taken.append(member)
        except EngineRefused as error:
            for member in taken:
                member.leave(f"it took version {weight_version}, which another engine refused: {error}")
            raise
        if not any(member.is_in for member in taken):
            return None
        self._pool.hold(weights)
        self._serving.switch(weight_version, None)
        for member in second:
            try:
                await self._turn(member, weights, spent)
            except EngineRefused as error:
                member.failed(f"it refused version {weight_version}: {error}")
        self._pool.hold(weights)  # conversations met half of the engines meanwhile
        return SwapTimes(spent.finish_s, spent.cut_s, spent.push_s, 0.0)

    async def _turn(self, member: Member, weights: Weights, spent: "_Spent") -> bool:
        """Give one engine the weights. Return False if it died or hung. Raises EngineRefused: it holds its old ones."""
        engine, timeout_s = member.engine, self._settings.call_timeout_s
        member.is_aside = True
        try:
            await spent.finishing(self._let_finish(member))
            try:
                await spent.cutting(cut(engine, lambda: member.running, _changed, timeout_s))
                await spent.pushing(in_time(member.push(weights), self._settings.push_timeout_s))
            finally:
                await in_time(engine.resume(), timeout_s)
        except EngineGone as error:
            log.warning("engine_missed_a_version", engine=member.url, weight_version=weights.weight_version)
            member.failed(str(error))
            return False
        finally:
            member.is_aside = False
        return member.is_in

    async def _let_finish(self, member: Member) -> None:
        """Wait for replies that should not be cut. They may be on another engine: the pool cannot tell."""
        end = time.monotonic() + self._settings.unbroken_drain_s
        while member.running and self._serving.not_resumable and (left_s := end - time.monotonic()) > 0:
            await self._serving.changed(left_s)


class _Spent:
    """Seconds of all engines together, by phase."""

    def __init__(self) -> None:
        self.finish_s = self.cut_s = self.push_s = 0.0

    async def finishing(self, work: Awaitable[None]) -> None:
        self.finish_s += await _timed(work)

    async def cutting(self, work: Awaitable[None]) -> None:
        self.cut_s += await _timed(work)

    async def pushing(self, work: Awaitable[None]) -> None:
        self.push_s += await _timed(work)


async def _timed(work: Awaitable[None]) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started


async def _changed(within_s: float) -> None:
    await asyncio.sleep(min(within_s, _LOOK_S))

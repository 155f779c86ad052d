"""Readiness of the engine: chats are held while the engine is down.

They are admitted once the engine serves the version that the ledger names.

Chats that arrive meanwhile wait (`engine.hold_s`), so an engine that crashes and comes back is a pause, not an error.
An engine that another program started may restart between two polls: the task asks it for the weights it should
hold.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from openclaw_rl.engines.admission import Closed, VersionAdmission
from openclaw_rl.engines.base import Engine
from openclaw_rl.errors import AlignmentError, EngineError, LedgerError
from openclaw_rl.telemetry.health import Health

log = structlog.get_logger()

POLL_S, DOWN_AFTER = 1.0, 3


class EngineReadiness:
    def __init__(
        self,
        engine: Engine,
        serving: VersionAdmission,
        restore: Callable[[], Awaitable[None]],
        *,
        is_in_place: Callable[[], Awaitable[bool]],
        exited: asyncio.Event | None = None,
        poll_s: float = POLL_S,
        health: Health | None = None,
    ) -> None:
        """is_in_place: tells whether a healthy engine still holds the version that serves.
        exited: set when an engine of ours ended, after chats were held.
        """
        self._engine, self._serving, self._restore, self._poll_s = engine, serving, restore, poll_s
        self._is_in_place = is_in_place
        self._health = health or Health()
        self._exited = exited or asyncio.Event()

    async def run(self) -> None:
        """Poll, hold, restore and admit, forever. The server's task group owns this task."""
        missed = 0
        while True:
            healthy = await self._engine.is_healthy()
            if healthy and not missed and self._serving.is_open and not await self._is_in_place():
                log.warning("engine_lost_its_version", weight_version=self._serving.current)
                self._serving.hold()
            # One missed poll may be a whole restart of an engine that another program owns: its adapters are gone then.
            if healthy and (missed or self._serving.is_closed_for(Closed.ENGINE)) and await self._reopen():
                missed = 0
            elif not healthy:
                missed += 1
            if missed >= DOWN_AFTER and not self._serving.is_closed_for(Closed.ENGINE):
                log.warning("engine_down", missed_polls=missed)
                self._serving.hold()
            await asyncio.sleep(self._poll_s)

    async def _reopen(self) -> bool:
        self._exited.clear()
        try:
            await self._restore()
        except (EngineError, AlignmentError, LedgerError, TimeoutError) as error:
            self._health.failed("restore", repr(error))
            return False
        if self._exited.is_set():  # the engine died again while its adapters were being loaded
            return False
        self._serving.release_hold()
        # No call may have reached the engine meanwhile that would report it as working.
        for part in ("engine", "restore", "publisher"):
            self._health.ok(part)
        log.info("engine_ready", weight_version=self._serving.current)
        return True

"""Engines of a pool that the operator drained, for work on their hosts.

Promises:

- A drained engine gets no new request. The replies that run on it end there, and its conversations go on elsewhere with
  their next turn.
- It may end and start meanwhile, and is no fault. It comes back only when told to, and first loads what the others
  hold.
- The last engine that serves cannot be drained.
- A restart of the server keeps what is drained.

Leaves to others: the way back into the pool (`pool`).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import structlog

from openclaw_rl.data_dir import write_json
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.engines.pool_member import DRAINED, EngineStatus, Member
from openclaw_rl.errors import RequestError

log = structlog.get_logger()


class EngineDrains:
    """The operator's choice of engines. Make it before the pool looks at its engines."""

    def __init__(self, pool: PooledEngine, file: Path, *, wait_s: float) -> None:
        """file: keeps the names of drained engines. wait_s: for an adapter that comes or leaves, or a swap."""
        self._pool, self._file, self._wait_s = pool, file, wait_s
        kept = [member for member in pool.every if member.name in _read(file)]
        if len(kept) == len(pool.every):
            if kept:
                log.warning("drains_ignored", reason="no engine would serve", engines=[one.name for one in kept])
            return
        for member in kept:
            self._take_out(member)

    async def set(self, number: int, is_drained: bool) -> EngineStatus:
        """Drain an engine, or let it come back. number: its place, from 1. Raises RequestError."""
        member = self._member(number)
        async with self._unchanging():
            if is_drained and not member.is_drained:
                self._drain(number, member)
            elif member.is_drained and not is_drained:
                member.is_drained, member.is_told, member.fault, member.retry_at = False, False, "it comes back", 0.0
                member.left.set()  # its watch looks at it now
                log.info("engine_undrained", engine=member.name)
            try:
                await asyncio.to_thread(self._keep)
            except OSError as error:
                log.warning("drains_not_kept", reason="a restart forgets them", error=str(error))
        return self._pool.statuses()[number - 1]

    def _keep(self) -> None:
        """Write the names of drained engines; those of engines that the settings do not name now stay. Blocks."""
        others = _read(self._file) - {one.name for one in self._pool.every}
        write_json(self._file, [*sorted(others), *(one.name for one in self._pool.every if one.is_drained)])

    def _member(self, number: int) -> Member:
        if not 1 <= number <= len(self._pool.every):
            last = len(self._pool.every)
            raise RequestError(
                f"there is no engine {number}: this server has 1 to {last}", status=404, code="engine_not_found"
            )
        return self._pool.every[number - 1]

    @asynccontextmanager
    async def _unchanging(self) -> AsyncIterator[None]:
        """Wait until no adapter comes or leaves and no weights are swapped, and let none begin meanwhile."""
        try:
            async with asyncio.timeout(self._wait_s) as waiting, self._pool.rolling():
                waiting.reschedule(None)
                yield
        except TimeoutError as error:
            said = "the pool takes new weights now; try again when they serve"
            raise RequestError(said, status=409, code="engine_busy") from error

    def _drain(self, number: int, member: Member) -> None:
        if not any(one.is_in for one in self._pool.every if one is not member):
            raise RequestError(
                f"engine {number} is the last one that serves, so it cannot be drained; bring another one back first",
                status=409,
                code="last_engine",
            )
        self._take_out(member)

    @staticmethod
    def _take_out(member: Member) -> None:
        member.is_drained = member.is_told = True
        member.leave(DRAINED)
        log.info("engine_drained", engine=member.name, running=member.running)


def _read(file: Path) -> frozenset[str]:
    try:
        names = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        log.warning("drains_unreadable", file=str(file), error=str(error))
        return frozenset()
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()

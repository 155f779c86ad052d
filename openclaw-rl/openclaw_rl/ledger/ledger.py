"""The ledger: the memory of the system, and its queue.

One SQLite file. Every turn is in exactly one counted state; every change of state is one transaction, checked for
legality and on disk before the call returns. It survives `kill -9` at any point, and `audit()` proves what it promises
from the file alone.

This class is the async face: it puts each call on the writer's thread or on a reader's, and hands over the time. What
the calls do is in `serving`, `judging`, `leases`, `versions`, `reports` and `audit`. Nothing here knows HTTP, engines
or torch.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import judging, open, serving
from openclaw_rl.ledger.lock import InstanceLock
from openclaw_rl.ledger.reader import Reader
from openclaw_rl.ledger.records import Identity
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.types import (
    DropReason,
    JudgedTurn,
    NextState,
    OpenTurn,
    Request,
    Sample,
    SideCount,
    Turn,
    TurnKey,
    TurnState,
    Verdict,
)

T = TypeVar("T")
Clock = Callable[[], float]

_CHAT_TIMEOUT_S = 10.0
"""A chat waits no longer than this for a disk that hangs; the reply then goes out unrecorded, and says so."""


class Ledger:
    """Made by `open`, ended by `aclose`. Every call may raise LedgerError."""

    def __init__(
        self, writer: Writer, reader: Reader, lock: InstanceLock, training: TrainingSettings, clock: Clock
    ) -> None:
        self._writer, self._reader, self._lock, self._training, self._clock = writer, reader, lock, training, clock

    @classmethod
    async def open(
        cls, path: Path, *, identity: Identity, training: TrainingSettings, clock: Clock = time.time
    ) -> Self:
        """Raises LedgerLocked (names the process that has it) and LedgerMismatch (names both models)."""
        lock = await asyncio.to_thread(_lock, path)
        try:
            await asyncio.to_thread(open.prepare, path, identity, now=clock())
        except BaseException:
            lock.release()
            raise
        writer = Writer(partial(open.connect, path))
        writer.start()
        return cls(writer, Reader(partial(open.connect, path, read_only=True)), lock, training, clock)

    async def aclose(self) -> None:
        """Writes what was handed in, then lets the file go."""
        try:
            await self._writer.close()
            await self._reader.close()
        finally:
            self._lock.release()

    @property
    def failure(self) -> str | None:
        """Why the file cannot be written now; None when all is well. It recovers by itself."""
        return self._writer.failure

    # Serving

    async def begin(self, request: Request) -> None:
        """On disk before generation starts."""
        await self._chat(lambda db: serving.begin(db, request))

    async def finish(self, turn: Turn, key: TurnKey) -> None:
        """On disk before the finish chunk is sent: SERVED, or DROPPED with `turn.drop`."""
        await self._chat(lambda db: serving.finish(db, turn, key, at=self._clock()))

    async def abandon(self, request_id: str, reason: DropReason, detail: str = "") -> None:
        """No turn came of this request."""
        await self._chat(lambda db: serving.abandon(db, request_id, reason, detail))

    async def count_side(self, side: SideCount) -> None:
        await self._chat(lambda db: serving.count_side(db, side))

    # Pairing

    async def open_turns(self, limit: int) -> list[OpenTurn]:
        """Turns that wait for a next state: the newest `limit`, newest last."""
        return await self._reader.read(lambda db: serving.open_turns(db, limit))

    async def pair(self, turn_id: str, next_state: NextState, *, by_request_id: str) -> None:
        """SERVED → PAIRED. A turn that was dropped stays so; its next state is kept for the record."""
        await self._chat(lambda db: serving.pair(db, turn_id, next_state, by_request_id, at=self._clock()))

    async def drop(self, turn_id: str, reason: DropReason, detail: str = "") -> None:
        """From any state before LEASED."""
        await self._chat(lambda db: serving.drop(db, turn_id, reason, detail, at=self._clock()))

    async def expire(self, older_than: float) -> list[str]:
        """SERVED turns that finished before → NO_NEXT_STATE; their ids."""
        expired: list[str] = []
        while some := await self._writer.write(lambda db: serving.expire(db, older_than, at=self._clock())):
            expired += some
        return expired

    # Judging and scoring

    async def to_judge(self, limit: int, *, skip: Collection[str] = ()) -> list[JudgedTurn]:
        """PAIRED turns, oldest first, less those somebody works on."""
        return await self._reader.read(lambda db: judging.in_state(db, TurnState.PAIRED, limit, skip))

    async def record_verdict(self, turn_id: str, verdict: Verdict) -> None:
        """PAIRED → JUDGED; a verdict of 0 is kept, and the turn ends NEUTRAL."""
        await self._writer.write(lambda db: judging.record_verdict(db, turn_id, verdict, at=self._clock()))

    async def to_score(self, limit: int, *, skip: Collection[str] = ()) -> list[JudgedTurn]:
        """JUDGED turns, oldest first, less those somebody works on."""
        return await self._reader.read(lambda db: judging.in_state(db, TurnState.JUDGED, limit, skip))

    async def record_sample(self, sample: Sample) -> None:
        """JUDGED → SAMPLED: it waits for a trainer."""
        await self._writer.write(lambda db: judging.record_sample(db, sample, at=self._clock()))

    async def _chat(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._writer.write(work, timeout_s=_CHAT_TIMEOUT_S)


def _lock(path: Path) -> InstanceLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise LedgerError(f"cannot make the folder {path.parent}: {error.strerror}") from error
    return InstanceLock(path.with_name(path.name + ".lock"))

"""The ledger: the memory of the system, and its queue.

One SQLite file. Every turn is in exactly one counted state; every change of state is one transaction, checked for
legality and on disk before the call returns. It survives `kill -9` at any point, and `audit()` proves what it promises
from the file alone.

This class is the async face: it puts each call on the writer's thread or on a reader's, and hands over the time. Its
parts are `turns_face`, `training_face`, `versions_face` and `deletion_face`; what the calls do is in `serving`,
`judging`, `leases`, `chain`, `versions`, `reports` and `audit`. Nothing here knows HTTP, engines or torch.
"""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Self

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import audit, open, reports, schema
from openclaw_rl.ledger.forget import Deletions
from openclaw_rl.ledger.leases import Leases
from openclaw_rl.ledger.lineage import Lineage
from openclaw_rl.ledger.open import InstanceLock
from openclaw_rl.ledger.records import Identity, TurnRecord, TurnSummary
from openclaw_rl.ledger.redaction import NounRedactor
from openclaw_rl.ledger.store import Clock, Reader
from openclaw_rl.ledger.turns import Turns
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.settings import MemorySettings, RedactionSettings, TrainingSettings
from openclaw_rl.types import Ids, TurnState

_CONNECTIONS = 4
"""Of the writer, its syncer, and two readers."""


class Ledger(Turns, Leases, Lineage, Deletions):
    """Made by `open`, ended by `aclose`. Every call may raise LedgerError."""

    def __init__(
        self,
        writer: Writer,
        reader: Reader,
        lock: InstanceLock,
        training: TrainingSettings,
        masks: NounRedactor,
        clock: Clock,
    ) -> None:
        super().__init__(writer, reader, training, masks, clock)
        self._lock = lock

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        identity: Identity,
        training: TrainingSettings,
        redaction: RedactionSettings = RedactionSettings(),  # noqa: B008 (frozen)
        memory: MemorySettings = MemorySettings(),  # noqa: B008 (frozen)
        clock: Clock = time.time,
        lock: InstanceLock | None = None,
    ) -> Self:
        """lock: this ledger's, held already; it is the ledger's to release from now on.

        Raises LedgerLocked (names the process that has it) and LedgerMismatch (names both models)."""
        if lock is None:
            lock = await asyncio.to_thread(_lock, path)
        try:
            await asyncio.to_thread(open.prepare, path, identity, now=clock(), lease_s=training.lease_s)
        except BaseException:
            lock.release()
            raise
        connect = partial(open.connect, path, cache_mb=memory.ledger_mb / _CONNECTIONS)
        writer = Writer(connect)
        writer.start()
        masks = NounRedactor(redaction, remembered=memory.clean_texts)
        return cls(writer, Reader(partial(connect, read_only=True)), lock, training, masks, clock)

    async def aclose(self) -> None:
        """Writes what was handed in, then lets the file go."""
        try:
            await self._writer.close()
            await self._reader.close()
        finally:
            self._lock.release()

    @property
    def is_closed(self) -> bool:
        return self._writer.is_closed

    @property
    def failure(self) -> str | None:
        """Why the file cannot be written now; None when all is well. It recovers by itself."""
        return self._writer.failure

    # Switches

    async def learning(self) -> bool:
        """Whether batches are handed out; kept over restarts."""
        return await self._reader.read(lambda db: bool(schema.get_int(db, "learning", 1)))

    async def set_learning(self, on: bool) -> None:
        await self._writer.write(lambda db: schema.put(db, "learning", int(on)))

    # For people and gates

    async def turn(self, turn_id: str) -> TurnRecord | None:
        return await self._reader.read(lambda db: reports.turn(db, turn_id))

    async def turns(
        self, *, limit: int = 50, state: TurnState | None = None, session_id: str | None = None, user: str | None = None
    ) -> list[TurnSummary]:
        """Newest first."""
        return await self._reader.read(
            lambda db: reports.turns(db, limit=limit, state=state, session_id=session_id, user=user)
        )

    async def counts(self) -> dict[str, int]:
        """By state, `dropped.<reason>`, `abandoned.<reason>`, `side.<kind>`; `sampled` is what waits for a trainer."""
        return await self._reader.read(reports.counts)

    async def recent_replies(self, *, sampled_by: int | None, limit: int) -> list[tuple[Ids, Ids]]:
        """(prompt, response) of the newest replies of one version, for gates."""
        return await self._reader.read(lambda db: reports.recent_replies(db, sampled_by=sampled_by, limit=limit))

    async def user_verdicts(self, *, limit: int) -> list[tuple[int, int]]:
        """(version, verdict) of the newest turns that a user answered, oldest first, of versions that are alive."""
        return await self._reader.read(lambda db: reports.user_verdicts(db, limit))

    async def recent_prompts(self, limit: int) -> list[Ids]:
        """The newest prompts of the sessions that were active last, for prewarming."""
        return await self._reader.read(lambda db: reports.recent_prompts(db, limit))

    async def audit(self, *, is_deep: bool = False) -> list[str]:
        """Violations of what the ledger promises, found from the file alone; [] is good."""
        return await self._reader.read(lambda db: audit.audit(db, is_deep=is_deep))


def _lock(path: Path) -> InstanceLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise LedgerError(f"cannot make the folder {path.parent}: {error.strerror}") from error
    return InstanceLock.beside(path)

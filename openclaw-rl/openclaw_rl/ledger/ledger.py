"""Ledger: the system's memory, and the queue between serving, judging and training.

One SQLite file. Every turn is in exactly one counted state. Every change of state is one transaction, checked for
legality and on disk before the call returns. The ledger survives `kill -9` at any point, and `audit` proves its
promises from the file alone.

`Ledger` opens and closes the file. Its operations are in its parts, one file for each subject: an operation is an async
method whose body is its SQL (`store`). The ledger knows no HTTP, no engines and no torch.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import leases, open, schema, versions
from openclaw_rl.ledger.audit import Auditing
from openclaw_rl.ledger.blobs import Connection
from openclaw_rl.ledger.episodes import Episodes
from openclaw_rl.ledger.feedback import UserFeedback
from openclaw_rl.ledger.forget import Forgetting
from openclaw_rl.ledger.groups import Groups
from openclaw_rl.ledger.judging import Judging
from openclaw_rl.ledger.leases import Leases
from openclaw_rl.ledger.lineage import Lineage
from openclaw_rl.ledger.open import InstanceLock
from openclaw_rl.ledger.outcomes import Outcomes
from openclaw_rl.ledger.pictures import Staged, folder_of, sweep_left
from openclaw_rl.ledger.policies import Policies
from openclaw_rl.ledger.practice import Practising
from openclaw_rl.ledger.records import Identity
from openclaw_rl.ledger.redaction import NounRedactor
from openclaw_rl.ledger.reports import Reports
from openclaw_rl.ledger.search import Searching
from openclaw_rl.ledger.steps import Steps
from openclaw_rl.ledger.store import Clock, LedgerLimits, Reader, read, write
from openclaw_rl.ledger.turns import Turns
from openclaw_rl.ledger.users import Users
from openclaw_rl.ledger.versions import Versions
from openclaw_rl.ledger.wishes import Wishes
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.settings import MemorySettings, RedactionSettings, TrainingSettings
from openclaw_rl.types import SHARED_POLICY

_CONNECTIONS = 4
"""Connections to the file: the writer's, its syncer's and two readers'."""


class Ledger(
    Turns,
    Judging,
    Episodes,
    Groups,
    Steps,
    UserFeedback,
    Wishes,
    Practising,
    Leases,
    Lineage,
    Policies,
    Versions,
    Forgetting,
    Reports,
    Searching,
    Outcomes,
    Users,
    Auditing,
):
    """All operations of one ledger file. `open` makes it, `aclose` ends it. Every call may raise LedgerError."""

    def __init__(
        self,
        writer: Writer,
        reader: Reader,
        lock: InstanceLock,
        training: TrainingSettings,
        redactor: NounRedactor,
        clock: Clock,
        limits: LedgerLimits = LedgerLimits(),  # noqa: B008 (frozen)
        staged: Staged | None = None,
    ) -> None:
        super().__init__(writer, reader, training, redactor, clock)
        self._staged = staged
        if staged is not None:
            staged.on_left = partial(writer.soon, sweep_left)
        self._lock, self._most_waiting, self._episodes = lock, limits.waiting, limits.episodes
        self._shows_pictures = limits.shows_pictures

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
        limits: LedgerLimits = LedgerLimits(),  # noqa: B008 (frozen)
    ) -> Self:
        """Open the file, and make or migrate it first if needed.

        lock: the lock of this file, which the caller holds already; the ledger releases it from now on.

        Raises LedgerLocked, which names the process that holds the file, and LedgerMismatch, which names both models.
        """
        if lock is None:
            lock = await asyncio.to_thread(_lock, path)
        try:
            await asyncio.to_thread(open.prepare, path, identity, now=clock(), lease_s=training.lease_s)
        except BaseException:
            lock.release()
            raise
        connect = partial(open.connect, path, cache_mb=memory.ledger_mb / _CONNECTIONS)
        staged = Staged(folder_of(path))
        writer = Writer(partial(_connect_writer, connect, staged))
        writer.start()
        redactor = NounRedactor(redaction, remembered=memory.clean_texts)
        reader = Reader(partial(connect, read_only=True))
        return cls(writer, reader, lock, training, redactor, clock, limits, staged)

    async def aclose(self) -> None:
        """Write the calls that were made, then close the file and release its lock."""
        try:
            await self._writer.close()
            await self._reader.close()
            if self._staged is not None:
                await self._staged.aclose()
        finally:
            self._lock.release()

    @property
    def is_closed(self) -> bool:
        return self._writer.is_closed

    @property
    def failure(self) -> str | None:
        """The reason that the file cannot be written now; None: it can. The writer recovers by itself."""
        return self._writer.failure

    @property
    def standing_secrets(self) -> str | None:
        """The number of new chats whose system prompt or tools hold a secret, in words; None: there are none."""
        return self._redactor.standing_secrets

    @read
    def learning(self, db: sqlite3.Connection, policy: str = SHARED_POLICY) -> bool:
        """Return True if trainers get batches of this policy; the switches survive restarts.

        The shared policy's switch is everyone's; each other policy has one of its own too.
        """
        return leases.learns(db, policy)

    @write
    def set_learning(self, db: sqlite3.Connection, on: bool, policy: str = SHARED_POLICY) -> None:
        """Pause or resume learning of a policy: of the shared one, of everyone. Resuming everyone resumes each."""
        if on and policy == SHARED_POLICY:
            for name in versions.names(db):
                schema.put(db, schema.of_policy("learning", name), 1)
        schema.put(db, schema.of_policy("learning", policy), int(on))


def _connect_writer(connect: Callable[[], sqlite3.Connection], staged: Staged) -> sqlite3.Connection:
    db = connect()
    assert isinstance(db, Connection)
    db.staged = staged
    return db


def _lock(path: Path) -> InstanceLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise LedgerError(f"cannot make the folder {path.parent}: {error.strerror}") from error
    return InstanceLock.beside(path)

"""Reads off the event loop: two threads, each with a connection of its own, so that a long read never stands before a
short one alone.

WAL: a read sees the last commit and never waits for the writer.

What the parts of the ledger's async face have in common: the threads that they put their work on, and the time.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.ledger.redaction import NounRedactor
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.settings import TrainingSettings

T = TypeVar("T")


class Reader:
    def __init__(self, connect: Callable[[], sqlite3.Connection], *, threads: int = 2) -> None:
        self._connect = connect
        self._own = threading.local()
        self._open: list[sqlite3.Connection] = []
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ledger-reader")

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            answer = asyncio.get_running_loop().run_in_executor(self._threads, self._read, work)
        except RuntimeError as error:
            raise LedgerUnavailable("the ledger is closed") from error
        return await answer

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            db: sqlite3.Connection | None = getattr(self._own, "db", None)
            if db is None:
                db = self._own.db = self._connect()
                self._open.append(db)
            db.execute("BEGIN")  # one snapshot for all statements of this read
            try:
                return work(db)
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise LedgerUnavailable(f"the ledger cannot be read: {error}") from error
        except OverflowError as error:  # a number that no column holds
            raise LedgerError(f"there is nothing like it: {error}") from error

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        for db in self._open:
            db.close()
        self._open.clear()


Clock = Callable[[], float]

CHAT_TIMEOUT_S = 10.0
"""A chat waits no longer than this for a disk that hangs; the reply then goes out unrecorded, and says so."""


class LedgerPart:
    def __init__(
        self, writer: Writer, reader: Reader, training: TrainingSettings, masks: NounRedactor, clock: Clock
    ) -> None:
        self._writer, self._reader, self._training, self._masks, self._clock = writer, reader, training, masks, clock

    async def _chat(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._writer.write(work, timeout_s=CHAT_TIMEOUT_S)

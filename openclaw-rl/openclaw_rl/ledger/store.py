"""Base of the ledger's parts: the reader threads, the clock, and the decorators `write`, `chat_write` and `read`.

An operation of the ledger is declared once, as a method whose body is its SQL:

    @write
    def renew(self, db: sqlite3.Connection, lease_id: str, fence: int) -> float: ...

The decorator makes an async method without `db` of it: `await ledger.renew(lease_id, fence)`. The body runs on the
writer's thread in one transaction, or on a reader's thread in one snapshot (`read`). A body that another transaction
needs too is a function of the module.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.ledger.pictures import Staged
from openclaw_rl.ledger.redaction import NounRedactor
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.settings import EpisodeSettings, TrainingSettings
from openclaw_rl.types import TurnState

T = TypeVar("T")
P = ParamSpec("P")
Part = TypeVar("Part", bound="LedgerPart")
Body = Callable[Concatenate[Part, sqlite3.Connection, P], T]
Method = Callable[Concatenate[Part, P], Coroutine[Any, Any, T]]

Clock = Callable[[], float]

CHAT_TIMEOUT_S = 10.0
"""Longest wait of a chat for a disk that hangs; after it the reply goes out unrecorded, and a log line reports it."""


class Reader:
    """Runs reads off the event loop: two threads, each with its own connection.

    A long read delays a short one only when both threads have one. A read sees the last commit and never waits for the
    writer (SQLite's WAL).
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], *, threads: int = 2) -> None:
        self._connect = connect
        self._own = threading.local()
        self._open: list[sqlite3.Connection] = []
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ledger-reader")

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on a reader's thread. Raises LedgerUnavailable when the file cannot be read."""
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
            raise LedgerError(f"no row has such a number: {error}") from error

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        for db in self._open:
            db.close()
        self._open.clear()


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    """Bounds of what waits, and of what engines get."""

    waiting: Mapping[TurnState, int] = field(default_factory=dict)
    """Most turns in a state. The transaction that makes one too many drops the oldest as `backlog`."""
    episodes: EpisodeSettings = field(default_factory=EpisodeSettings)
    """Ages of episodes, groups that may wait, and groups of a batch."""
    shows_pictures: bool = True
    """False: no engine gets pictures, so no prompt with pictures is given out to be scored or answered anew."""


class LedgerPart:
    """Base class of the ledger's parts: the writer, the readers, the settings, the redactor and the clock."""

    def __init__(
        self, writer: Writer, reader: Reader, training: TrainingSettings, redactor: NounRedactor, clock: Clock
    ) -> None:
        self._writer, self._reader, self._clock = writer, reader, clock
        self._training, self._redactor = training, redactor
        self._staged: Staged | None = None
        """Pictures of requests that come; None: they are written with the row."""
        self._step = (0, 0.0)
        """Fence of the lease whose optimizer stepped last, and the end of the time (monotonic) that deletions wait."""
        self._episodes = EpisodeSettings()
        self._shows_pictures = True
        self._most_waiting: Mapping[TurnState, int] = {}
        """Most turns that may be in a state; every transaction holds to it."""

    def _hold_limits(self, db: sqlite3.Connection) -> None:
        """Drop what is too many, at the end of each transaction that a part writes."""
        raise NotImplementedError

    async def _written(self, body: Callable[[sqlite3.Connection], T], *, timeout_s: float | None, is_synced: bool) -> T:
        """Run `body` in a transaction, as `write` and `chat_write` do."""

        def work(db: sqlite3.Connection) -> T:
            done = body(db)
            if self._most_waiting:
                self._hold_limits(db)
            return done

        return await self._writer.write(work, timeout_s=timeout_s, is_synced=is_synced)


def write(body: Body[Part, P, T]) -> Method[Part, P, T]:
    """Make an async method of `body` that runs it in a transaction and returns once the transaction is on disk."""
    return _on_writer(body, timeout_s=None, is_synced=True)


def chat_write(*, is_synced: bool) -> Callable[[Body[Part, P, T]], Method[Part, P, T]]:
    """Return the decorator `write` for a chat, which waits at most `CHAT_TIMEOUT_S`.

    is_synced: False commits without an fsync. `kill -9` loses no such commit, a power cut may.
    """

    def decorate(body: Body[Part, P, T]) -> Method[Part, P, T]:
        return _on_writer(body, timeout_s=CHAT_TIMEOUT_S, is_synced=is_synced)

    return decorate


def read(body: Body[Part, P, T]) -> Method[Part, P, T]:
    """Make an async method of `body` that runs it in one snapshot on a reader's thread."""

    @wraps(body)
    async def method(self: Part, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._reader.read(lambda db: body(self, db, *args, **kwargs))

    return method


def _on_writer(body: Body[Part, P, T], *, timeout_s: float | None, is_synced: bool) -> Method[Part, P, T]:
    @wraps(body)
    async def method(self: Part, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._written(lambda db: body(self, db, *args, **kwargs), timeout_s=timeout_s, is_synced=is_synced)

    return method

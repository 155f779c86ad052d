"""Writer: the thread that owns the only writing connection and commits in groups.

Every write is a job, a function of the connection. The thread takes all jobs that wait and runs each in its own
savepoint inside one transaction. It commits once and then answers them. The syncer's thread makes one fsync for all
jobs that need it. Promises:

* A job that raises leaves no trace and does not affect the other jobs; its caller gets the exception.
* A job that returns is on disk. A job with `is_synced=False` is with the operating system: it survives `kill -9`; a
  power failure may lose it, whole.
* When the file cannot be written (disk full, locked by another program, an I/O error), the jobs of the group fail with
  `LedgerUnavailable`, and `failure` has the reason. Every second the thread then tries a write of its own, as large as
  a turn, until one succeeds; no job waits for it. A smaller job that finds room meanwhile is done and does not end the
  failure, or the state would flicker. A torn file stays a failure: no write repairs it.
* The queue is bounded: beyond `max_waiting` jobs a call fails at once, so that a slow disk never becomes a slow chat.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import structlog

from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.ledger.syncer import Syncer, checkpoint

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_GROUP = 256
_PROBE_BYTES = 1 << 16
_TORN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Job:
    work: Work[Any]
    answer: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop
    is_synced: bool = True
    is_alone: bool = False
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any = None
    error: Exception | None = None


def _ended(group: list[_Job]) -> list[_Outcome]:
    return [_Outcome(error=LedgerUnavailable("the ledger's writer has ended")) for _ in group]


class Writer:
    """The writer's thread and its queue. `start` starts it, `close` ends it; calls come from one event loop."""

    def __init__(
        self, connect: Callable[[], sqlite3.Connection], *, max_waiting: int = 10_000, probe_s: float = 1.0
    ) -> None:
        self._connect, self._max_waiting, self._probe_s = connect, max_waiting, probe_s
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._waiting = 0  # touched on the event loop only
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._syncer = Syncer(connect)
        self._failure: str | None = None
        self._lost = 0
        """Number of writes that failed since `_failure`."""
        self._is_torn = False
        self._probe_at = 0.0

    @property
    def failure(self) -> str | None:
        """The reason that the file cannot be written now; None: it can."""
        return self._failure or self._syncer.failure

    def start(self) -> None:
        self._thread.start()

    async def close(self) -> None:
        """Write the jobs that wait, then end the thread."""
        if not self.is_closed:
            self.is_closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    async def alone(self, work: Work[T]) -> T:
        """Run `work` outside a transaction, between two groups (SQLite refuses VACUUM inside one)."""
        return await self.write(work, is_alone=True)

    def soon(self, work: Work[object]) -> None:
        """Run `work` as `alone` does, behind the jobs that wait. No caller waits for it; a closed writer skips it."""
        if self.is_closed or not self._thread.is_alive():
            return
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future(), loop, is_alone=True)
        job.answer.add_done_callback(_tell_of_failure)
        self._waiting += 1
        self._jobs.put(job)

    async def write(
        self, work: Work[T], *, timeout_s: float | None = None, is_synced: bool = True, is_alone: bool = False
    ) -> T:
        """Run `work` in a transaction and return once it is on disk.

        is_synced: False returns after the commit, without the fsync, a few milliseconds earlier.
        timeout_s: a job that the thread has not reached by then is not run. A job that it has reached may still be
        written, and so may a job whose fsync fails: the caller must accept both.
        """
        if self.is_closed or not self._thread.is_alive():
            raise LedgerUnavailable("the ledger is closed")
        if self._waiting >= self._max_waiting:
            raise LedgerUnavailable(f"the ledger is {self._waiting} writes behind")
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future(), loop, is_synced, is_alone)
        self._waiting += 1
        self._jobs.put(job)
        try:
            async with asyncio.timeout(timeout_s):
                value: T = await job.answer
                return value
        except TimeoutError as error:
            job.is_given_up = True
            raise LedgerUnavailable(f"the ledger did not answer within {timeout_s} s") from error

    def _run(self) -> None:
        try:
            db = self._connect()
            try:
                db.execute("PRAGMA synchronous = NORMAL")
                self._syncer.start()
                try:
                    self._serve(db)
                finally:
                    self._syncer.close()
            finally:
                db.close()
        finally:  # closed, or broken by a bug: the jobs that still wait get an error
            group, _ = self._take()
            if group:
                self._answer(group, _ended(group))

    def _serve(self, db: sqlite3.Connection) -> None:
        is_last = False
        while not is_last:
            try:
                job = self._jobs.get(timeout=self._wait_s)
            except Empty:
                self._syncer.tell()
                if self._probe_in_s == 0.0:
                    self._probe(db)
                continue
            if job is None:
                return
            taken, is_last = self._take(job)
            for is_alone, some in groupby(taken, key=lambda job: job.is_alone):
                group = list(some)
                outcomes = _ended(group)
                try:
                    outcomes = [_alone(db, job) for job in group] if is_alone else self._commit(db, group)
                finally:
                    self._hand_out(group, outcomes)
            if self._syncer.is_log_long:
                self._syncer.is_log_long = not checkpoint(db)
            if self._probe_in_s == 0.0:  # jobs come all the time
                self._probe(db)

    def _take(self, *first: _Job) -> tuple[list[_Job], bool]:
        """Return the next group, and True if `close` was called after it."""
        group = list(first)
        while len(group) < _GROUP:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            if job is None:
                return group, True
            group.append(job)
        return group, False

    def _commit(self, db: sqlite3.Connection, group: list[_Job]) -> list[_Outcome]:
        try:
            db.execute("BEGIN IMMEDIATE")
            outcomes = [_attempt(db, job) for job in group]
            db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back(db)
            self._failed(error)
            self._lost += len(group)
            return [_Outcome(error=LedgerUnavailable(f"the ledger cannot be written: {error}"))] * len(group)
        return outcomes

    def _roll_back(self, db: sqlite3.Connection) -> None:
        if db.in_transaction:
            try:
                db.execute("ROLLBACK")
            except sqlite3.Error as error:  # SQLite rolled back by itself
                log.warning("ledger_rollback", error=str(error))

    def _hand_out(self, group: list[_Job], outcomes: list[_Outcome]) -> None:
        """Answer the jobs that need no fsync or failed; answer the others when the log is on disk."""
        pairs = list(zip(group, outcomes, strict=True))
        waiting = [(job, outcome) for job, outcome in pairs if job.is_synced and outcome.error is None]
        if len(waiting) < len(pairs):
            now = [(job, outcome) for job, outcome in pairs if not job.is_synced or outcome.error is not None]
            self._answer([job for job, _ in now], [outcome for _, outcome in now])

        def told(fault: OSError | None) -> None:
            found = [outcome for _, outcome in waiting]
            if fault is not None:
                found = [_Outcome(error=LedgerUnavailable(f"the ledger cannot be synced: {fault}"))] * len(waiting)
            self._answer([job for job, _ in waiting], found)

        self._syncer.committed(told if waiting else None)

    def _answer(self, group: list[_Job], outcomes: list[_Outcome]) -> None:
        try:
            group[0].loop.call_soon_threadsafe(self._settle, group, outcomes)
        except RuntimeError:  # the loop is closed, and with it every caller
            log.warning("ledger_unanswered", jobs=len(group))

    def _settle(self, group: list[_Job], outcomes: list[_Outcome]) -> None:
        self._waiting -= len(group)
        for job, outcome in zip(group, outcomes, strict=True):
            if job.answer.done():  # its caller was cancelled or gave up
                continue
            if outcome.error is not None:
                job.answer.set_exception(outcome.error)
            else:
                job.answer.set_result(outcome.value)

    @property
    def _wait_s(self) -> float | None:
        """Longest wait for a job."""
        return min((s for s in (self._probe_in_s, self._syncer.tell_in_s) if s is not None), default=None)

    @property
    def _probe_in_s(self) -> float | None:
        """Seconds until the next probe; None: no probe is due."""
        return max(self._probe_at - time.monotonic(), 0.0) if self.failure and not self._is_torn else None

    def _probe(self, db: sqlite3.Connection) -> None:
        """Write and delete a row as large as a turn: its success shows that turns can be written."""
        self._probe_at = time.monotonic() + self._probe_s
        try:
            db.execute("BEGIN IMMEDIATE")
            db.execute("REPLACE INTO meta VALUES ('probe', zeroblob(?))", (_PROBE_BYTES,))
            db.execute("COMMIT")
            db.execute("DELETE FROM meta WHERE key = 'probe'")
            self._syncer.sync(db)
        except OSError:
            return  # its failure stands
        except sqlite3.Error as error:
            self._roll_back(db)
            self._failed(error)
        else:
            self._succeeded()

    def _failed(self, error: sqlite3.Error) -> None:
        if self._failure is None:
            log.error("ledger_cannot_write", error=str(error))
            self._probe_at = time.monotonic() + self._probe_s
        self._failure = str(error)
        self._is_torn |= getattr(error, "sqlite_errorcode", 0) & 0xFF in _TORN

    def _succeeded(self) -> None:
        if self._failure is not None:
            log.info("ledger_writes_again", after=self._failure, not_written=self._lost)
            self._failure, self._lost = None, 0


def _tell_of_failure(answer: "asyncio.Future[object]") -> None:
    if not answer.cancelled() and (error := answer.exception()) is not None:
        log.warning("ledger_job_failed", error=str(error))


def _alone(db: sqlite3.Connection, job: _Job) -> _Outcome:
    try:
        return _Outcome(job.work(db))
    except (sqlite3.Error, OSError) as error:  # OSError: of the pictures' folder
        return _Outcome(error=LedgerUnavailable(f"the ledger cannot be written: {error}"))


def _attempt(db: sqlite3.Connection, job: _Job) -> _Outcome:
    """Run one job in its savepoint. A fault of the file is raised (the group fails); any other is the job's own."""
    if job.is_given_up:
        return _Outcome(error=LedgerUnavailable("given up by its caller"))
    db.execute("SAVEPOINT job")
    try:
        value = job.work(db)
    except (
        sqlite3.IntegrityError,
        sqlite3.DataError,
        sqlite3.ProgrammingError,
        sqlite3.InterfaceError,
        OverflowError,
    ) as error:
        outcome = _Outcome(error=LedgerError(f"the ledger refused a row: {error}"))
    except sqlite3.Error:
        raise
    except Exception as error:  # an error of the work itself: its caller gets it
        outcome = _Outcome(error=error)
    else:
        db.execute("RELEASE job")
        return _Outcome(value)
    db.execute("ROLLBACK TO job")
    db.execute("RELEASE job")
    return outcome

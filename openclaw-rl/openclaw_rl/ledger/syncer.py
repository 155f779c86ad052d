"""Syncer: the thread that makes commits durable, so that a write without a need for an fsync never waits for one.

The writer commits with `synchronous = NORMAL`: the log holds the transaction, the disk may not. This thread then does
the part of `FULL` that is missing: one `fdatasync` of the log for all jobs that wait, then their answers. A slow disk
delays only the jobs that asked for an fsync. The thread also moves the log into the file in idle time, over its own
connection. So a commit without an fsync is on disk after 0.4 s without a write, or with the next fsync.
"""

import os
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import structlog

_IDLE_S = 0.2
_CHECKPOINT_GROUPS = 400
"""Commits after which the log is moved into the file without a pause; else it is moved after `_IDLE_S` of silence."""

log = structlog.get_logger(__name__)
_sync = getattr(os, "fdatasync", os.fsync)
Told = Callable[[OSError | None], None]


@dataclass(frozen=True, slots=True)
class _Commit:
    told: Told | None
    """Callback once the commit is on disk, or cannot be; None: no job of the group waits."""
    groups: int
    """Groups of the writer that it stands for: itself, and those without an fsync of which this thread was not told."""


class Syncer:
    """Thread that syncs commits. The writer's thread calls `start` (once there is a log), `committed` and `close`."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._commits: SimpleQueue[_Commit | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger-syncer", daemon=True)
        self._log_fd: int | None = None
        self._log_path = Path()
        self.failure: str | None = None
        """Reason that the last fsync failed; None: it did not."""
        self._untold = 0
        """Groups of which this thread was not told yet; the writer's."""
        self.is_log_long = False
        """True if writes never pause: then the writer moves the log into the file, between two commits."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Sync and answer the commits that wait, then end the thread."""
        self._commits.put(None)
        self._thread.join()

    def committed(self, told: Told | None) -> None:
        # A group that waits for no fsync is that of a chat's request. To wake this thread for it would delay the chat's
        # first token, because both need Python's lock.
        self._untold += 1
        if told is not None or self._untold >= _CHECKPOINT_GROUPS:
            self._wake(told)

    @property
    def tell_in_s(self) -> float | None:
        """Seconds of silence after which the writer has to `tell`; None: this thread was told of all groups."""
        return _IDLE_S if self._untold else None

    def tell(self) -> None:
        """Tell this thread of the groups that wait for no fsync: it syncs the log too, and moves it into the file."""
        if self._untold:
            self._wake(None)

    def _wake(self, told: Told | None) -> None:
        self._commits.put(_Commit(told, self._untold))
        self._untold = 0

    def sync(self, db: sqlite3.Connection) -> None:
        """Write the log to the disk. Raises OSError."""
        if self._log_fd is None:
            (file,) = (row["file"] for row in db.execute("PRAGMA database_list") if row["name"] == "main")
            self._log_path = Path(f"{file}-wal")
            # Not the file itself: closing it would release SQLite's own locks on it. The log carries no locks.
            self._log_fd = os.open(self._log_path, os.O_RDONLY)
            folder = os.open(self._log_path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        _sync(self._log_fd)
        self.failure = None

    def _run(self) -> None:
        db = self._connect()
        try:
            self._serve(db)
        finally:
            db.close()
            if self._log_fd is not None:
                os.close(self._log_fd)

    def _serve(self, db: sqlite3.Connection) -> None:
        is_last, groups = False, 0
        while not is_last:
            try:
                first = self._commits.get(timeout=_IDLE_S if groups else None)
            except Empty:
                # Beside a reader a checkpoint may move nothing, and then it syncs nothing either.
                if self._tried_to_sync(db) is None:
                    checkpoint(db)
                    groups = 0
                continue
            commits, is_last = self._take(first)
            self._tell(db, [commit.told for commit in commits if commit.told is not None])
            groups += sum(commit.groups for commit in commits)
            if groups >= _CHECKPOINT_GROUPS and not self.is_log_long:
                checkpoint(db)  # most of the log; the writer moves the newest commits
                self.is_log_long = True
                groups = 0

    def _take(self, first: _Commit | None) -> tuple[list[_Commit], bool]:
        """Return all commits that wait, and True if `close` was called after them."""
        commits = []
        while first is not None:
            commits.append(first)
            try:
                first = self._commits.get_nowait()
            except Empty:
                return commits, False
        return commits, True

    def _tell(self, db: sqlite3.Connection, waiting: list[Told]) -> None:
        if not waiting:
            return
        fault = self._tried_to_sync(db)
        for told in waiting:
            told(fault)

    def _tried_to_sync(self, db: sqlite3.Connection) -> OSError | None:
        """Sync the log; return the error instead of raising it."""
        try:
            self.sync(db)
        except OSError as error:
            if self.failure is None:
                log.error("ledger_cannot_sync", error=str(error))
            self.failure = f"the log cannot be synced: {error.strerror or error}"
            return error
        return None


def checkpoint(db: sqlite3.Connection) -> bool:
    """Move the log into the file. True: all of it is there, and the next write begins a new log."""
    try:
        busy, size, done = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        log.warning("ledger_checkpoint_failed", error=str(error))
        return False
    return not busy and size == done

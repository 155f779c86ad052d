"""Makes commits durable beside the writer, so that a write nobody needs an fsync for never waits for one.

The writer commits with `synchronous = NORMAL`: the log holds the transaction, the disk may not. This thread then does
what `FULL` would have done inside the commit, one `fdatasync` of the log for all that wait, and answers. A slow disk
holds up those who asked for it, and nobody else. It also moves the log into the file while nobody writes, over a
connection of its own.
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
"""The log is moved into the file after `_IDLE_S` of silence, or after so many commits without one."""

log = structlog.get_logger(__name__)
_sync = getattr(os, "fdatasync", os.fsync)
Told = Callable[[OSError | None], None]


@dataclass(frozen=True, slots=True)
class _Commit:
    told: Told | None
    """Called once it is on disk, or cannot be; None: nobody asked."""


class Syncer:
    """Started by `start` once the file has a log, ended by `close`; both are the writer thread's, as is `committed`."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._commits: SimpleQueue[_Commit | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger-syncer", daemon=True)
        self._log_fd: int | None = None
        self._log_path = Path()
        self.failure: str | None = None
        """Why the last fsync did not work."""
        self.is_log_long = False
        """Somebody writes all the time: only between two commits can the log end and begin anew. The writer does it."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """What was committed is still synced and told."""
        self._commits.put(None)
        self._thread.join()

    def committed(self, told: Told | None) -> None:
        self._commits.put(_Commit(told))

    def sync(self, db: sqlite3.Connection) -> None:
        """The log's content to the disk. Raises OSError."""
        if self._log_fd is None:
            (file,) = (row["file"] for row in db.execute("PRAGMA database_list") if row["name"] == "main")
            self._log_path = Path(f"{file}-wal")
            # Not the file itself: closing that would let go of SQLite's own locks on it. The log carries none.
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
                checkpoint(db)
                groups = 0
                continue
            commits, is_last = self._take(first)
            self._tell(db, [commit.told for commit in commits if commit.told is not None])
            groups += len(commits)
            if groups >= _CHECKPOINT_GROUPS and not self.is_log_long:
                checkpoint(db)  # most of it; what was written meanwhile is left to the writer
                self.is_log_long = True
                groups = 0

    def _take(self, first: _Commit | None) -> tuple[list[_Commit], bool]:
        """All that wait, and whether the end was asked for behind them."""
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
        fault: OSError | None = None
        try:
            self.sync(db)
        except OSError as error:
            fault = error
            if self.failure is None:
                log.error("ledger_cannot_sync", error=str(error))
            self.failure = f"the log cannot be synced: {error.strerror or error}"
        for told in waiting:
            told(fault)


def checkpoint(db: sqlite3.Connection) -> bool:
    """Move the log into the file. Whether all of it is there, so that a write that begins now begins the log anew."""
    try:
        busy, size, done = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        log.warning("ledger_checkpoint_failed", error=str(error))
        return False
    return not busy and size == done

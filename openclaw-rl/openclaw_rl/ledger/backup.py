"""A copy of the ledger, whole and consistent, also while a server writes to it.

SQLite's own backup, in one step over one read transaction: the server never waits for it. The copy is one file that
opens by itself, readable for its owner only.
"""

import os
import sqlite3
from pathlib import Path

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import open
from openclaw_rl.ledger.lock import InstanceLock


def compact(ledger: Path) -> tuple[int, int]:
    """Write the file anew; its size before and after. Raises LedgerError, LedgerLocked while a server has it."""
    if not ledger.is_file():
        raise LedgerError(f"no ledger at {ledger}")
    before = ledger.stat().st_size
    with InstanceLock.beside(ledger):
        try:
            db = open.connect(ledger)
            try:
                db.execute("VACUUM")
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                db.close()
        except sqlite3.Error as error:
            raise LedgerError(f"cannot compact the ledger {ledger}: {error}") from error
    return before, ledger.stat().st_size


def backup(ledger: Path, copy: Path) -> int:
    """The size of the copy in bytes. Raises LedgerError; then there is none."""
    if not ledger.is_file():
        raise LedgerError(f"no ledger at {ledger}")
    try:
        os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise LedgerError(f"cannot make {copy}: {error.strerror}") from error
    try:
        source, target = open.connect(ledger, read_only=True), sqlite3.connect(copy, isolation_level=None)
        try:
            source.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")  # a server that opens it makes it a WAL file again
            (problem,) = target.execute("PRAGMA quick_check(1)").fetchone()
        finally:
            source.close()
            target.close()
        if problem != "ok":
            raise LedgerError(f"the copy of {ledger} is damaged, and so may be the ledger: {problem}")
    except sqlite3.Error as error:
        copy.unlink()
        raise LedgerError(f"cannot copy the ledger {ledger}: {error}") from error
    except LedgerError:
        copy.unlink()
        raise
    return copy.stat().st_size

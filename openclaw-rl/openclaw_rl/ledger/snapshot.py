"""Access to a ledger from outside the server: reads for export and replay, backup, compaction.

A snapshot and a backup work while a server writes, in one read transaction: all rows are of one moment, and the server
never waits. A snapshot writes no byte and takes no lock. (While it is open, SQLite keeps the server's writes in the log
beside the file.) Compaction needs the ledger's lock.
"""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from openclaw_rl.errors import LedgerError, LedgerMismatch
from openclaw_rl.ledger import open, pictures, reports, schema, versions
from openclaw_rl.ledger.open import InstanceLock
from openclaw_rl.ledger.records import Identity, TurnRecord, read_judged, read_request, read_sample
from openclaw_rl.ledger.schema import MIGRATIONS
from openclaw_rl.types import JudgedTurn, Sample, Scope


class Snapshot:
    """Consistent view of a ledger, made by `Snapshot.of`. Rows come oldest first, and are read lazily."""

    def __init__(self, db: sqlite3.Connection, identity: Identity) -> None:
        self._db = db
        self.identity = identity

    @classmethod
    @contextmanager
    def of(cls, path: Path) -> Iterator[Self]:
        """Open a snapshot. Raises LedgerError when there is no such ledger, LedgerMismatch for another schema."""
        if not path.is_file():
            raise LedgerError(f"no ledger at {path}")
        try:
            db = open.connect(path, read_only=True)
        except sqlite3.Error as error:
            raise LedgerError(f"cannot read the ledger {path}: {error}") from error
        try:
            db.execute("BEGIN")
            (found,) = db.execute("PRAGMA user_version").fetchone()
            if found != len(MIGRATIONS):
                raise LedgerMismatch(
                    f"the ledger {path} has schema {found}, this program reads {len(MIGRATIONS)}"
                    " (a start of the server migrates an older one)"
                )
            identity = schema.get_text(db, "identity")
            if identity is None:
                raise LedgerError(f"the ledger {path} belongs to no model yet: no server ever ran on it")
            yield cls(db, Identity(**json.loads(identity)))
        except sqlite3.Error as error:
            raise LedgerError(f"cannot read the ledger {path}: {error}") from error
        finally:
            db.close()

    def turns(self, *, user: str | None = None, policy: str | None = None) -> Iterator[TurnRecord]:
        """Yield every turn, or those of one user or policy, demonstrations and practice among them."""
        wanted = [(f"{of} = ?", value) for of, value in (("user", user), ("turn.policy", policy)) if value is not None]
        where = " AND ".join(["TRUE", *(condition for condition, _ in wanted)])
        query = f"SELECT turn_id FROM request JOIN turn USING (id) WHERE {where} ORDER BY request.id"
        for (turn_id,) in self._db.execute(query, [value for _, value in wanted]):
            if (record := reports.read_record(self._db, turn_id)) is not None:
                yield record

    def policies(self) -> list[str]:
        """Return the policies by name, the shared one among them."""
        return versions.names(self._db)

    def judged(self) -> Iterator[JudgedTurn]:
        """Yield every turn that has a next state or feedback, but no step of an episode: its credit is its group's."""
        rows = self._db.execute(
            "SELECT id FROM turn WHERE demonstration_of IS NULL AND of_episode IS NULL"
            " AND (EXISTS (SELECT 1 FROM next_state WHERE next_state.id = turn.id)"
            " OR EXISTS (SELECT 1 FROM feedback WHERE feedback.turn = turn.id)) ORDER BY id"
        )
        for (row,) in rows:
            yield read_judged(self._db, row)

    def demonstrations(self) -> Iterator[tuple[float, Scope, Sample]]:
        """Yield the newest demonstration of each turn: its time, its scope, its sample."""
        rows = self._db.execute("SELECT max(id) FROM turn WHERE demonstration_of IS NOT NULL GROUP BY demonstration_of")
        for (row,) in sorted(rows.fetchall()):
            if (sample := read_sample(self._db, row)) is not None:
                request = read_request(self._db, row)
                yield request.received_at, request.scope, sample


def compact(ledger: Path) -> tuple[int, int]:
    """Rewrite the file; return its size before and after. Raises LedgerError, LedgerLocked while a server has it."""
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
    """Copy the ledger to one file that only its owner can read, and its pictures to a folder beside that file.

    Return the size of all in bytes. Raises LedgerError, and then leaves no file.
    """
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
            if problem != "ok":
                raise LedgerError(f"the copy of {ledger} is damaged, and so may be the ledger: {problem}")
            size = pictures.copy_files(pictures.names(target), pictures.folder_of(ledger), pictures.folder_of(copy))
        finally:
            source.close()
            target.close()
    except sqlite3.Error as error:
        copy.unlink()
        raise LedgerError(f"cannot copy the ledger {ledger}: {error}") from error
    except LedgerError:
        copy.unlink()
        raise
    return copy.stat().st_size + size

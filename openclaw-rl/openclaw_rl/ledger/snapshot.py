"""A ledger read from outside: by a person's export or an offline replay, also while a server writes to it.

One read transaction: everything is as it was at one moment, and the server never waits for it. Nothing is written, no
lock is taken. (While it is open, SQLite keeps what the server writes in the log beside the file.)
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from openclaw_rl.errors import LedgerError, LedgerMismatch
from openclaw_rl.ledger import meta, open, reports
from openclaw_rl.ledger.records import Identity, TurnRecord
from openclaw_rl.ledger.rows import read_judged, read_request, read_sample
from openclaw_rl.ledger.schema import MIGRATIONS
from openclaw_rl.types import JudgedTurn, Sample, Scope


class Snapshot:
    """Made by `Snapshot.of`. Everything comes oldest first, read as it is asked for."""

    def __init__(self, db: sqlite3.Connection, identity: Identity) -> None:
        self._db = db
        self.identity = identity

    @classmethod
    @contextmanager
    def of(cls, path: Path) -> Iterator[Self]:
        """Raises LedgerError when there is no such ledger, LedgerMismatch when it is of another schema."""
        if not path.is_file():
            raise LedgerError(f"no ledger at {path}")
        try:
            db = open.connect(path, read_only=True)
        except sqlite3.Error as error:
            raise LedgerError(f"cannot read the ledger {path}: {error}") from error
        try:
            db.execute("BEGIN")
            (schema,) = db.execute("PRAGMA user_version").fetchone()
            if schema != len(MIGRATIONS):
                raise LedgerMismatch(
                    f"the ledger {path} has schema {schema}, this program reads {len(MIGRATIONS)}"
                    " (a start of the server migrates an older one)"
                )
            identity = meta.get_text(db, "identity")
            if identity is None:
                raise LedgerError(f"the ledger {path} belongs to no model yet: no server ever ran on it")
            yield cls(db, Identity(**json.loads(identity)))
        except sqlite3.Error as error:
            raise LedgerError(f"cannot read the ledger {path}: {error}") from error
        finally:
            db.close()

    def turns(self) -> Iterator[TurnRecord]:
        """Every turn, demonstrations among them."""
        for (turn_id,) in self._db.execute("SELECT turn_id FROM turn ORDER BY id"):
            if (record := reports.turn(self._db, turn_id)) is not None:
                yield record

    def judged(self) -> Iterator[JudgedTurn]:
        """Every turn of which something was said: a next state, or feedback."""
        rows = self._db.execute(
            "SELECT id FROM turn WHERE demonstration_of IS NULL AND (EXISTS (SELECT 1 FROM next_state WHERE"
            " next_state.id = turn.id) OR EXISTS (SELECT 1 FROM feedback WHERE feedback.turn = turn.id)) ORDER BY id"
        )
        for (row,) in rows:
            yield read_judged(self._db, row)

    def demonstrations(self) -> Iterator[tuple[float, Scope, Sample]]:
        """The newest of each turn: when it came, whose it is."""
        rows = self._db.execute("SELECT max(id) FROM turn WHERE demonstration_of IS NOT NULL GROUP BY demonstration_of")
        for (row,) in sorted(rows.fetchall()):
            if (sample := read_sample(self._db, row)) is not None:
                request = read_request(self._db, row)
                yield request.received_at, request.scope, sample

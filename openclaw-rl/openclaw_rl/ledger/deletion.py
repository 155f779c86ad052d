"""Taking requests out of the ledger, with all that hangs on them, while others write.

    watch → plan (a long read, from one snapshot) → rows → pieces → unwatch

A piece goes when no row that stays refers to it. Whoever comes to refer to an old piece behind the plan's back does so
through `pieces.put` or `pieces.touch`, on the one writing connection, which notes it while it is watched: such a piece
stays. Freed pages are overwritten with zeros. What is left of old contents in the slack of other pages, and in the log,
goes with `scrub`.
"""

import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from openclaw_rl.ledger.blobs import Connection, unpack_ids
from openclaw_rl.ledger.schema import cut, in_list

VACUUM_BYTES = 512 * 2**20
"""A larger file is not written anew while chats wait (about a second for this size)."""
_PAUSE_ROWS, _PAUSE_S = 2000, 0.002
"""A plan reads every row: now and then it lets the event loop have the interpreter."""


def watch(db: sqlite3.Connection) -> None:
    assert isinstance(db, Connection)
    db.touched = set()


def unwatch(db: sqlite3.Connection) -> None:
    assert isinstance(db, Connection)
    db.touched = None


def orphans(db: sqlite3.Connection, doomed: Collection[int]) -> list[int]:
    """Pieces that nobody but these requests refers to; those that nobody refers to at all are among them."""
    (newest,) = db.execute("SELECT coalesce(max(id), 0) FROM piece").fetchone()
    held = np.zeros(newest + 1, dtype=np.bool_)
    for number, (row, lists, singles) in enumerate(_references(db)):
        if row not in doomed:
            for blob in lists:
                held[_ids(blob)] = True
            for piece in singles:
                held[piece] = True
        yield_interpreter(number)
    return [piece for (piece,) in db.execute("SELECT id FROM piece ORDER BY id") if not held[piece]]


def yield_interpreter(number: int) -> None:
    """Call it for every row of a plan."""
    if number % _PAUSE_ROWS == 0:
        time.sleep(_PAUSE_S)


def pieces_of(db: sqlite3.Connection, rows: Collection[int]) -> set[int]:
    """All that these requests refer to."""
    found: set[int] = set()
    for some in cut(sorted(rows)):
        marks, values = in_list(some)
        for _, lists, singles in _references(db, f"WHERE id IN ({marks})", values):
            found.update(*map(unpack_ids, lists), singles)
    return found


def delete_rows(db: sqlite3.Connection, rows: Collection[int]) -> int:
    """Returns how many turns were among them. The counters follow what is inserted and changed; what is deleted is
    taken from them here."""
    turns = 0
    with zeroed(db):
        for some in cut(sorted(rows, reverse=True)):  # a demonstration goes before the turn that it corrects
            marks, values = in_list(some)
            _uncount(db, marks, values)
            turns += db.execute(f"SELECT count(*) FROM turn WHERE id IN ({marks})", values).fetchone()[0]
            for table in ("event", "feedback", "lease_sample"):
                db.execute(f"DELETE FROM {table} WHERE turn IN ({marks})", values)
            for table in ("sample", "verdict", "next_state", "open_turn", "reply", "turn", "request"):
                db.execute(f"DELETE FROM {table} WHERE id IN ({marks})", values)
    return turns


def delete_pieces(db: sqlite3.Connection, planned: Sequence[int]) -> int:
    """Those of the plan that nobody came to refer to since."""
    assert isinstance(db, Connection)
    deleted = 0
    with zeroed(db):
        for some in cut([piece for piece in planned if piece not in (db.touched or ())]):
            marks, values = in_list(some)
            deleted += db.execute(f"DELETE FROM piece WHERE id IN ({marks})", values).rowcount
    return deleted


def delete_sides(db: sqlite3.Connection, where: str, values: Sequence[object]) -> None:
    for name, n in db.execute(
        f"SELECT 'side.' || kind, count(*) FROM side WHERE {where} GROUP BY 1", values
    ).fetchall():
        db.execute("UPDATE counter SET n = n - ? WHERE name = ?", (n, name))
    db.execute(f"DELETE FROM side WHERE {where}", values)


def scrub(db: sqlite3.Connection) -> bool:
    """Outside a transaction: write the file anew and empty the log, so that no byte of what was deleted is left. False:
    the file is too large for that now, or somebody reads from the log."""
    (pages,), (size,) = db.execute("PRAGMA page_count").fetchone(), db.execute("PRAGMA page_size").fetchone()
    is_small = pages * size <= VACUUM_BYTES
    try:
        if is_small:
            db.execute("VACUUM")
        busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError:  # no room for a second file, or somebody else has it just now
        return False
    return is_small and not busy


class zeroed:
    """Freed pages and cells are overwritten inside the block."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        (self._before,) = self._db.execute("PRAGMA secure_delete").fetchone()
        self._db.execute("PRAGMA secure_delete = ON")

    def __exit__(self, *_: object) -> None:
        self._db.execute(f"PRAGMA secure_delete = {self._before}")


_Reference = tuple[int, tuple[bytes, ...], tuple[int, ...]]


def _references(db: sqlite3.Connection, where: str = "", values: Sequence[int] = ()) -> Iterator[_Reference]:
    """(request, packed lists of pieces, single pieces): every reference there is."""
    for row, prompt, messages, *single in db.execute(
        f"SELECT id, prompt, messages, sampling, tools, template_kwargs FROM request {where}", values
    ):
        yield row, (prompt, messages), tuple(piece for piece in single if piece is not None)
    for row, message in db.execute(f"SELECT id, message FROM reply {where}", values):
        yield row, (), (message,)
    for row, messages in db.execute(f"SELECT id, messages FROM next_state {where}", values):
        yield row, (messages,), ()
    for row, prompt in db.execute(f"SELECT id, prompt FROM sample {where}", values):
        if prompt is not None:
            yield row, (prompt,), ()


def _ids(blob: bytes) -> NDArray[np.unsignedinteger]:
    if not blob:
        return np.zeros(0, dtype=np.uint16)
    return np.frombuffer(blob, dtype="<u2" if blob[0] == 2 else "<u4", offset=1)


def _uncount(db: sqlite3.Connection, marks: str, values: Sequence[int]) -> None:
    for query in (
        f"SELECT iif(reason IS NULL, state, 'dropped.' || reason), count(*) FROM turn WHERE id IN ({marks}) GROUP BY 1",
        "SELECT 'requests', count(*) FROM request LEFT JOIN turn USING (id)"
        f" WHERE demonstration_of IS NULL AND id IN ({marks})",
        "SELECT 'abandoned.' || reason, count(*) FROM request"
        f" WHERE outcome = 'abandoned' AND id IN ({marks}) GROUP BY 1",
        f"SELECT 'feedback.' || effect, count(*) FROM feedback WHERE turn IN ({marks}) GROUP BY 1",
    ):
        for name, n in db.execute(query, values).fetchall():
            db.execute("UPDATE counter SET n = n - ? WHERE name = ?", (n, name))

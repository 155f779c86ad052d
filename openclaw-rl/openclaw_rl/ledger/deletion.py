"""Deletion of requests and of all rows that depend on them, while chats write.

    watch → plan (a long read, from one snapshot) → rows → pieces

A piece is deleted if no row that stays refers to it. A row may come to refer to an old piece after the plan was read.
It does so through `blobs.put` or `blobs.touch`, on the one writing connection, which notes the piece from `watch` until
the watch is over: such a piece stays. Freed pages are overwritten with zeros. `scrub` removes the rest of old contents,
in the slack of other pages and in the log.
"""

import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import episodes, pictures, wishes
from openclaw_rl.ledger.blobs import Connection, Watch, unpack_ids
from openclaw_rl.ledger.schema import cut, in_list

VACUUM_BYTES = 512 * 2**20
"""Largest file that is rewritten while chats wait (about a second for this size)."""
_PAUSE_ROWS, _PAUSE_S = 2000, 0.002
"""A plan reads every row and pauses between them, so that the event loop gets the interpreter."""


def watch(db: sqlite3.Connection, by: Watch) -> None:
    """Note in `by`, until it is over, the old pieces that rows come to refer to."""
    assert isinstance(db, Connection)
    db.watch = by


def orphans(db: sqlite3.Connection, doomed: Collection[int]) -> list[int]:
    """Return the pieces that no other request refers to; unreferenced pieces are among them."""
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
    """Pause at every `_PAUSE_ROWS`-th row of a plan."""
    if number % _PAUSE_ROWS == 0:
        time.sleep(_PAUSE_S)


def pieces_of(db: sqlite3.Connection, rows: Collection[int]) -> set[int]:
    """Return the pieces that these requests refer to."""
    found: set[int] = set()
    for some in cut(sorted(rows)):
        marks, values = in_list(some)
        for _, lists, singles in _references(db, f"WHERE id IN ({marks})", values):
            found.update(*map(unpack_ids, lists), singles)
    return found


def delete_rows(db: sqlite3.Connection, rows: Collection[int]) -> int:
    """Delete requests and their rows in all tables; return the number of turns among them."""
    turns = 0
    with zeroed(db):
        ended: set[int] = set()
        for some in cut(sorted(rows, reverse=True)):  # demonstrations and practice go before the turn that they are of
            marks, values = in_list(some)
            _uncount(db, marks, values)  # triggers count inserts and updates, but no deletions
            turns += db.execute(f"SELECT count(*) FROM turn WHERE id IN ({marks})", values).fetchone()[0]
            query = f"SELECT DISTINCT in_episode FROM request WHERE in_episode IS NOT NULL AND id IN ({marks})"
            ended.update(episode for (episode,) in db.execute(query, values))
            db.execute(f"DELETE FROM request_picture WHERE request IN ({marks})", values)
            for table in ("event", "feedback", "lease_sample", "wish_source"):
                db.execute(f"DELETE FROM {table} WHERE turn IN ({marks})", values)
            for table in ("sample", "credit", "verdict", "next_state", "open_turn", "reply", "turn", "request"):
                db.execute(f"DELETE FROM {table} WHERE id IN ({marks})", values)
        pictures.delete_unused(db)
        wishes.delete_orphans(db)
        episodes.delete_empty(db, ended)
    return turns


def delete_pieces(db: sqlite3.Connection, planned: Sequence[int]) -> int:
    """Delete the planned pieces that no row came to refer to since; return their number.

    Raises LedgerError when the deletion was given up meanwhile: nothing notes such pieces any more.
    """
    assert isinstance(db, Connection)
    if db.watch is None or db.watch.is_over:
        raise LedgerError("the deletion was given up")
    touched = db.watch.touched
    deleted = 0
    with zeroed(db):
        for some in cut([piece for piece in planned if piece not in touched]):
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
    """Delete the files of deleted pictures, rewrite the ledger's file and empty its log: no deleted byte is left.

    Runs outside a transaction. False: the file is too large for that now, or a reader still uses the log.
    """
    is_swept = pictures.sweep(db)
    (pages,), (size,) = db.execute("PRAGMA page_count").fetchone(), db.execute("PRAGMA page_size").fetchone()
    is_small = pages * size <= VACUUM_BYTES
    try:
        if is_small:
            db.execute("VACUUM")
        busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError:  # no room for a second file, or another program has locked it
        return False
    return is_swept and is_small and not busy


class zeroed:
    """Context in which SQLite overwrites freed pages and cells."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        (self._before,) = self._db.execute("PRAGMA secure_delete").fetchone()
        self._db.execute("PRAGMA secure_delete = ON")

    def __exit__(self, *_: object) -> None:
        self._db.execute(f"PRAGMA secure_delete = {self._before}")


_Reference = tuple[int, tuple[bytes, ...], tuple[int, ...]]


def _references(db: sqlite3.Connection, where: str = "", values: Sequence[int] = ()) -> Iterator[_Reference]:
    """Yield every reference to a piece: (request, packed lists of pieces, single pieces)."""
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
        "SELECT iif(practice IS NULL, '', 'practice.') || iif(reason IS NULL, state, 'dropped.' || reason), count(*)"
        f" FROM turn WHERE id IN ({marks}) GROUP BY 1",
        "SELECT 'requests', count(*) FROM request LEFT JOIN turn USING (id)"
        f" WHERE demonstration_of IS NULL AND practice IS NULL AND id IN ({marks})",
        "SELECT 'abandoned.' || reason, count(*) FROM request"
        f" WHERE outcome = 'abandoned' AND id IN ({marks}) GROUP BY 1",
        f"SELECT 'feedback.' || effect, count(*) FROM feedback WHERE turn IN ({marks}) GROUP BY 1",
    ):
        for name, n in db.execute(query, values).fetchall():
            db.execute("UPDATE counter SET n = n - ? WHERE name = ?", (n, name))

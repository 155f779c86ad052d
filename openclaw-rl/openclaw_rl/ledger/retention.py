"""What a ledger lets go of by itself: turns that ended long ago, or the oldest when the file is full.

Only what is over goes: trained in a version that the gate has seen, dropped, or abandoned. What waits for an answer, a
judge or a trainer stays whatever its age; a ledger full of such turns is over its limit, and says so. Reads are from
snapshots, deletions are small transactions between those of chats.
"""

import sqlite3
from collections.abc import Sequence

from openclaw_rl.ledger import deletion
from openclaw_rl.ledger.in_list import in_list
from openclaw_rl.ledger.pieces import touch

_OVER = (
    "(request.outcome = 'abandoned' AND turn.id IS NULL OR turn.state = 'dropped' OR turn.state = 'trained' AND"
    " trained_in IN (SELECT weight_version FROM version WHERE state NOT IN ('candidate', 'gated', 'loading')))"
)
_SPARE = 0.05
"""A file over its limit is brought this much below it."""


def used_bytes(db: sqlite3.Connection) -> int:
    """Of the file, without its free pages."""
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def choose(db: sqlite3.Connection, *, older_than: float | None, most_bytes: int | None, limit: int) -> list[int]:
    """At most `limit` requests that may go, oldest first."""
    share = 0
    if most_bytes is not None and (used := used_bytes(db)) > most_bytes:
        (requests,) = db.execute("SELECT count(*) FROM request").fetchone()
        share = int(requests * (1 - most_bytes * (1 - _SPARE) / used)) + 1
    if older_than is None and not share:
        return []
    rows = db.execute(
        f"SELECT id, received_at FROM request LEFT JOIN turn USING (id) WHERE {_OVER} ORDER BY id LIMIT ?", (limit,)
    ).fetchall()
    return [row for place, (row, received_at) in enumerate(rows) if place < share or (older_than or 0) > received_at]


def remove(db: sqlite3.Connection, rows: Sequence[int]) -> int:
    """Those of the rows that are still over; the pieces of the others stay. Returns the turns removed."""
    marks, values = in_list(rows)
    over = {
        row
        for (row,) in db.execute(
            f"SELECT id FROM request LEFT JOIN turn USING (id) WHERE {_OVER} AND id IN ({marks})"
            # a demonstration is for a turn, and keeps it
            " AND NOT EXISTS (SELECT 1 FROM turn AS demo WHERE demo.demonstration_of = request.id"
            f" AND demo.id NOT IN ({marks}))",
            (*values, *values),
        )
    }
    touch(db, deletion.pieces_of(db, set(rows) - over))
    return deletion.delete_rows(db, over)

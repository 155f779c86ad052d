"""Forgetting a session, a conversation or a user (`selection`): the requests, turns, samples and feedback, and every
message that nobody else refers to.

Two parts, so that chats do not wait for the long one. `plan` reads, from a snapshot; `carry_out` deletes, in one
transaction, unless more was said meanwhile: then a new plan is needed (`deletion`).

What cannot be taken back: weights that were trained on it. They are named; `untrained` is the newest version before
them. A trainer that holds one of its samples loses its lease. Versions keep the figures of their probes, which are
prompts and replies of the batch, and lose the tokens at once, also those that the gate has yet to look at.
"""

import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass

import orjson

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import chain, deletion, leases, versions
from openclaw_rl.ledger.codec import pack_bytes, unpack_bytes
from openclaw_rl.ledger.in_list import in_list
from openclaw_rl.ledger.records import Forgotten
from openclaw_rl.ledger.selection import Selection, cut
from openclaw_rl.ledger.states import DEAD


@dataclass(frozen=True, slots=True)
class Plan:
    selection: Selection
    rows: frozenset[int]
    orphans: tuple[int, ...]
    newest_request: int
    newest_piece: int


def plan(db: sqlite3.Connection, select: Callable[[sqlite3.Connection], Selection]) -> Plan:
    """Reads every row once. Raises LedgerError when there is nothing of that name."""
    selection = select(db)
    (newest_request,) = db.execute("SELECT coalesce(max(id), 0) FROM request").fetchone()
    (newest_piece,) = db.execute("SELECT coalesce(max(id), 0) FROM piece").fetchone()
    rows = selection.rows(db)
    return Plan(selection, rows, tuple(deletion.orphans(db, rows)), newest_request, newest_piece)


def carry_out(db: sqlite3.Connection, plan: Plan, *, at: float) -> Forgotten | None:
    """None: it went on, plan anew."""
    selection, rows = plan.selection, plan.rows
    later = selection.rows(db, after=plan.newest_request)
    running = db.execute("SELECT id FROM request WHERE outcome = 'running'")
    if any(row in rows or row in later for (row,) in running):
        raise LedgerError(f"{selection} is being answered right now: try again")
    if later or max(deletion.pieces_of(db, rows), default=0) > plan.newest_piece:
        return None
    fences: set[int] = set()
    numbers: set[int] = set()
    for some in cut(sorted(rows)):
        marks, values = in_list(some)
        fences.update(
            fence
            for (fence,) in db.execute(
                f"SELECT DISTINCT fence FROM lease_sample WHERE outcome = 'leased' AND turn IN ({marks})", values
            )
        )
        numbers.update(
            number
            for (number,) in db.execute(
                "SELECT DISTINCT weight_version FROM lease_sample JOIN lease USING (fence) JOIN version USING"
                f" (lease_id) WHERE outcome = 'trained' AND turn IN ({marks})",
                values,
            )
        )
    for fence in fences:
        leases.end(db, fence, "revoked", reason="a session was forgotten", at=at)
    turns = deletion.delete_rows(db, rows)
    if selection.sides is not None:
        deletion.delete_sides(db, *selection.sides)
    removed = deletion.delete_pieces(db, plan.orphans)
    _clear_probes(db, numbers)
    return Forgotten(selection.user, selection.session_id, turns, removed, tuple(sorted(numbers)))


def untrained(db: sqlite3.Connection, trained: Collection[int]) -> int | None:
    """The newest version that a rollback can go to and that none of these, or what was built on them, is part of. None:
    none of them is alive, there is nothing to go back from."""
    alive = [number for number in trained if versions.row(db, number)["state"] not in DEAD]
    if not alive:
        return None
    target = chain.rollback_target(db, min(alive) - 1)
    if target is None:
        raise LedgerError("no version before the session's can be gone back to")
    return target


def drop_weights(db: sqlite3.Connection, after: int) -> list[str]:
    """Dead versions behind `after` lose their weights; the folders that nobody names any more."""
    dead = ", ".join(f"'{state}'" for state in DEAD)
    found = db.execute(
        f"SELECT DISTINCT folder FROM version WHERE folder IS NOT NULL AND weight_version > ? AND state IN ({dead})",
        (after,),
    ).fetchall()
    db.execute(
        f"UPDATE version SET folder = NULL, has_optimizer = 0 WHERE weight_version > ? AND state IN ({dead})", (after,)
    )
    return [
        str(folder)
        for (folder,) in found
        if not db.execute("SELECT 1 FROM version WHERE folder = ?", (folder,)).fetchone()
    ]


def _clear_probes(db: sqlite3.Connection, numbers: Collection[int]) -> None:
    """The figures stay: the gate of a version that is on its way may need them."""
    with deletion.zeroed(db):
        for number in numbers:
            packed = versions.row(db, number)["probes"]
            if packed is None:
                continue
            probes = [probe | {"prompt_ids": [], "response_ids": []} for probe in orjson.loads(unpack_bytes(packed))]
            db.execute(
                "UPDATE version SET probes = ? WHERE weight_version = ?", (pack_bytes(orjson.dumps(probes)), number)
            )

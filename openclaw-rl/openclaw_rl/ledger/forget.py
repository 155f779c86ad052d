"""Forgetting a session: its requests, turns, samples and feedback, and every message that nobody else refers to.

Two parts, so that chats do not wait for the long one. `plan` reads, from a snapshot; `carry_out` deletes, in one
transaction, unless more was said in the session meanwhile: then a new plan is needed (`deletion`).

What cannot be taken back: weights that were trained on the session. They are named; `untrained` is the newest version
before them. A trainer that holds one of its samples loses its lease.
"""

import json
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import chain, deletion, leases, meta, versions
from openclaw_rl.ledger.records import Forgotten
from openclaw_rl.ledger.states import DEAD

_DOOMED = "SELECT id FROM request WHERE user = ? AND session_id = ?"
_IN_USE = "('candidate', 'gated', 'loading')"


@dataclass(frozen=True, slots=True)
class Plan:
    user: str
    session_id: str
    rows: frozenset[int]
    orphans: tuple[int, ...]
    newest_piece: int


def owner(db: sqlite3.Connection, session_id: str, user: str | None) -> str:
    """Whose session it is. Raises LedgerError: nobody's, or several users have one of that name."""
    found = [name for (name,) in db.execute("SELECT DISTINCT user FROM request WHERE session_id = ?", (session_id,))]
    if user is not None:
        found = [name for name in found if name == user]
    if not found:
        raise LedgerError(f"no session {session_id!r}" + (f" of user {user!r}" if user else ""))
    if len(found) > 1:
        raise LedgerError(f"several users have a session {session_id!r}: {', '.join(sorted(found))}; name one")
    return str(found[0])


def plan(db: sqlite3.Connection, user: str, session_id: str) -> Plan:
    """Reads every row once."""
    rows = _rows(db, user, session_id)
    (newest,) = db.execute("SELECT coalesce(max(id), 0) FROM piece").fetchone()
    return Plan(user, session_id, rows, tuple(deletion.orphans(db, rows)), newest)


def carry_out(db: sqlite3.Connection, plan: Plan, *, at: float) -> Forgotten | None:
    """None: the session went on, plan anew."""
    who = (plan.user, plan.session_id)
    if db.execute(f"SELECT 1 FROM request WHERE outcome = 'running' AND id IN ({_DOOMED})", who).fetchone():
        raise LedgerError(f"session {plan.session_id!r} is being answered right now: try again")
    if _rows(db, *who) != plan.rows or max(deletion.pieces_of(db, plan.rows), default=0) > plan.newest_piece:
        return None
    live = db.execute(
        f"SELECT DISTINCT fence FROM lease_sample WHERE outcome = 'leased' AND turn IN ({_DOOMED})", who
    ).fetchone()
    if live is not None:
        leases.end(db, live[0], "revoked", reason="a session was forgotten", at=at)
    trained = db.execute(
        "SELECT DISTINCT weight_version FROM lease_sample JOIN lease USING (fence) JOIN version USING (lease_id)"
        f" WHERE outcome = 'trained' AND turn IN ({_DOOMED}) ORDER BY 1",
        who,
    )
    numbers = tuple(number for (number,) in trained.fetchall())
    turns = deletion.delete_rows(db, plan.rows)
    deletion.delete_sides(db, "user = ? AND session_id = ?", who)
    pieces = deletion.delete_pieces(db, plan.orphans)
    # Probes are prompts and replies of the batch. Versions that are not served yet need theirs a little longer.
    _put_marked(db, sorted({*_marked(db), *numbers}))
    clear_probes(db)
    return Forgotten(plan.user, plan.session_id, turns, pieces, numbers)


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


def clear_probes(db: sqlite3.Connection) -> list[int]:
    """Take the probes of forgotten sessions out of versions that are done with them. Returns those that still wait."""
    marked = _marked(db)
    waiting = []
    for number in marked:
        done = db.execute(
            f"UPDATE version SET probes = NULL WHERE weight_version = ? AND state NOT IN {_IN_USE}", (number,)
        )
        if not done.rowcount:
            waiting.append(number)
    _put_marked(db, waiting)
    return waiting


def _rows(db: sqlite3.Connection, user: str, session_id: str) -> frozenset[int]:
    return frozenset(row for (row,) in db.execute(_DOOMED, (user, session_id)))


def _marked(db: sqlite3.Connection) -> list[int]:
    """Versions that trained on a forgotten session, and still have probes."""
    return list(json.loads(meta.get_text(db, "probes_of_forgotten") or "[]"))


def _put_marked(db: sqlite3.Connection, numbers: Sequence[int]) -> None:
    meta.put(db, "probes_of_forgotten", json.dumps(list(numbers)) if numbers else None)

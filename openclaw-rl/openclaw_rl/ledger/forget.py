"""Forgetting a session: its requests, turns, samples and feedback, and every message that nobody else refers to.

Two parts, so that chats do not wait for the long one. `plan` reads, from a snapshot: which contents only this session
holds, which versions trained on it. `carry_out` deletes, in one transaction, and looks again at whatever was written
since the plan. Freed pages are overwritten with zeros.

What cannot be taken back: weights that were trained on the session. They are named; a replay of what is left makes an
adapter without it. A trainer that holds one of its samples loses its lease.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import leases
from openclaw_rl.ledger.codec import unpack_ids
from openclaw_rl.ledger.records import Forgotten

_OF_A_TURN = ("sample", "verdict", "next_state", "open_turn", "reply")
_DOOMED = "SELECT id FROM request WHERE user = ?1 AND session_id = ?2"
_SOME = 500


@dataclass(frozen=True, slots=True)
class Plan:
    user: str
    session_id: str
    pieces: frozenset[int]
    """Held by this session alone, when it was made."""
    newest: int
    """The newest request it knew."""


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
    own = set(_pieces(db, f"id IN ({_DOOMED})", user, session_id))
    for piece in _pieces(db, f"id NOT IN ({_DOOMED})", user, session_id):
        own.discard(piece)
    (newest,) = db.execute("SELECT coalesce(max(id), 0) FROM request").fetchone()
    return Plan(user, session_id, frozenset(own), newest)


def carry_out(db: sqlite3.Connection, plan: Plan, *, at: float) -> Forgotten:
    who = (plan.user, plan.session_id)
    if db.execute(f"SELECT 1 FROM request WHERE outcome = 'running' AND id IN ({_DOOMED})", who).fetchone():
        raise LedgerError(f"session {plan.session_id!r} is being answered right now: try again")
    (before,) = db.execute("PRAGMA secure_delete").fetchone()
    db.execute("PRAGMA secure_delete = ON")
    own = set(plan.pieces) | set(_pieces(db, f"id > {plan.newest} AND id IN ({_DOOMED})", *who))
    for piece in _pieces(db, f"id > {plan.newest} AND id NOT IN ({_DOOMED})", *who):
        own.discard(piece)
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
    versions = tuple(number for (number,) in trained.fetchall())
    _uncount(db, who)
    turns = db.execute(f"SELECT count(*) FROM turn WHERE id IN ({_DOOMED})", who).fetchone()[0]
    for table in ("event", "feedback", "lease_sample"):
        db.execute(f"DELETE FROM {table} WHERE turn IN ({_DOOMED})", who)
    for table in (*_OF_A_TURN, "turn"):
        db.execute(f"DELETE FROM {table} WHERE id IN ({_DOOMED})", who)
    db.execute(f"DELETE FROM request WHERE id IN ({_DOOMED})", who)
    db.execute("DELETE FROM side WHERE user = ? AND session_id = ?", who)
    doomed = sorted(own)
    for start in range(0, len(doomed), _SOME):
        some = doomed[start : start + _SOME]
        db.execute(f"DELETE FROM piece WHERE id IN ({','.join('?' * len(some))})", some)
    # Probes are prompts and replies of the batch; a version that is done with needs them no more.
    for number in versions:
        db.execute(
            "UPDATE version SET probes = NULL WHERE weight_version = ?"
            " AND state NOT IN ('candidate', 'gated', 'loading')",
            (number,),
        )
    db.execute(f"PRAGMA secure_delete = {before}")
    return Forgotten(plan.user, plan.session_id, turns, len(doomed), versions)


def _pieces(db: sqlite3.Connection, which: str, user: str, session_id: str) -> Iterator[int]:
    """Every piece that these requests, and what hangs on them, refer to; the same one more than once."""
    who = (user, session_id) if "?1" in which else ()
    for prompt, messages, *others in db.execute(
        f"SELECT prompt, messages, sampling, tools, template_kwargs FROM request WHERE {which}", who
    ):
        yield from unpack_ids(prompt)
        yield from unpack_ids(messages)
        yield from (piece for piece in others if piece is not None)
    for (message,) in db.execute(f"SELECT message FROM reply WHERE {which}", who):
        yield message
    for (messages,) in db.execute(f"SELECT messages FROM next_state WHERE {which}", who):
        yield from unpack_ids(messages)
    for (prompt,) in db.execute(f"SELECT prompt FROM sample WHERE prompt IS NOT NULL AND {which}", who):
        yield from unpack_ids(prompt)


def _uncount(db: sqlite3.Connection, who: tuple[str, str]) -> None:
    """The counters follow what is inserted and changed; what is deleted is taken from them here."""
    for query in (
        f"SELECT iif(reason IS NULL, state, 'dropped.' || reason), count(*) FROM turn WHERE id IN ({_DOOMED})"
        " GROUP BY 1",
        "SELECT 'requests', count(*) FROM request LEFT JOIN turn USING (id)"
        f" WHERE demonstration_of IS NULL AND id IN ({_DOOMED})",
        f"SELECT 'abandoned.' || reason, count(*) FROM request WHERE outcome = 'abandoned' AND id IN ({_DOOMED})"
        " GROUP BY 1",
        f"SELECT 'feedback.' || effect, count(*) FROM feedback WHERE turn IN ({_DOOMED}) GROUP BY 1",
        "SELECT 'side.' || kind, count(*) FROM side WHERE user = ?1 AND session_id = ?2 GROUP BY 1",
    ):
        for name, n in db.execute(query, who).fetchall():
            db.execute("UPDATE counter SET n = n - ? WHERE name = ?", (n, name))

"""Scope of a deletion: a session, a conversation that has no session id, or all requests of a user.

A conversation without an id is recognized by its history, as in pairing: it begins with the same question and the same
answer (system messages aside). A repetition of its first question that no request continued is part of it too. Another
chat that began with the same question and got another answer is not. A client may send another beginning each time (the
last messages only, or a decorated first one). So the requests that answered a turn of it, and the turns that they
answered, are part of it too.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import blobs, deletion
from openclaw_rl.ledger.blobs import unpack_ids
from openclaw_rl.ledger.schema import cut, in_list
from openclaw_rl.types import Ids

_SYSTEM = ("system", "developer")


class Selection(Protocol):
    @property
    def user(self) -> str: ...

    @property
    def session_id(self) -> str | None: ...

    @property
    def sides(self) -> tuple[str, tuple[str, ...]] | None:
        """Condition and values that select the counts of background requests."""
        ...

    def rows(self, db: sqlite3.Connection, *, after: int = 0) -> frozenset[int]:
        """Return the requests to delete; of those behind row `after`, all that may be part of the scope."""
        ...

    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Session:
    user: str
    session_id: str | None

    @property
    def sides(self) -> tuple[str, tuple[str, ...]]:
        return "user = ? AND session_id = ?", (self.user, self.session_id or "")

    def rows(self, db: sqlite3.Connection, *, after: int = 0) -> frozenset[int]:
        query = "SELECT id FROM request WHERE user = ? AND session_id = ? AND id > ?"
        return frozenset(row for (row,) in db.execute(query, (self.user, self.session_id, after)))

    def __str__(self) -> str:
        return f"session {self.session_id!r}"


@dataclass(frozen=True, slots=True)
class Everything:
    user: str
    session_id: str | None = None

    @property
    def sides(self) -> tuple[str, tuple[str, ...]]:
        return "user = ?", (self.user,)

    def rows(self, db: sqlite3.Connection, *, after: int = 0) -> frozenset[int]:
        query = "SELECT id FROM request WHERE user = ? AND id > ?"
        return frozenset(row for (row,) in db.execute(query, (self.user, after)))

    def __str__(self) -> str:
        return f"user {self.user!r}"


@dataclass(frozen=True, slots=True)
class Conversation:
    user: str
    turn: int
    """The row of the turn that was named."""
    question: Ids
    """Pieces of the messages before the first answer."""
    answer: int | None
    """Piece of the first answer; None: no request continued the conversation."""
    session_id: str | None = None
    sides: tuple[str, tuple[str, ...]] | None = None

    def rows(self, db: sqlite3.Connection, *, after: int = 0) -> frozenset[int]:
        asked: list[int] = []
        goes_on: dict[str, int] = {}
        requests: dict[str, int] = {}
        query = "SELECT id, request_id, messages FROM request WHERE user = ? AND session_id IS NULL AND id > ?"
        for number, (row, request_id, messages) in enumerate(db.execute(query, (self.user, after)), start=1):
            deletion.yield_interpreter(number)
            requests[request_id] = row
            said = _from(db, self.question[0], unpack_ids(messages))
            if said[: len(self.question)] != self.question:
                continue
            rest = said[len(self.question) :]
            if not rest:
                asked.append(row)
            elif rest[0] == self.answer or after:
                goes_on[request_id] = row
        if after:
            return frozenset((*asked, *goes_on.values()))
        rows = {self.turn, *goes_on.values()}
        for row, by_request in _answered(db, asked):
            if by_request in (None, "side") or by_request in goes_on:
                rows.add(row)
        return _with_dependents(db, _with_answers(db, rows, requests))

    def __str__(self) -> str:
        return "the conversation"


def of_session(db: sqlite3.Connection, session_id: str, user: str | None) -> Session:
    """Return a session. Raises LedgerError when no user, or more than one, has a session of that name."""
    # UNION: a name once. A session of background requests alone is one, too: its name and its counts are kept.
    query = "SELECT user FROM request WHERE session_id = ? UNION SELECT user FROM side WHERE session_id = ?"
    found = [name for (name,) in db.execute(query, (session_id, session_id))]
    if user is not None:
        found = [name for name in found if name == user]
    if not found:
        raise LedgerError(f"no session {session_id!r}" + (f" of user {user!r}" if user else ""))
    if len(found) > 1:
        raise LedgerError(f"several users have a session {session_id!r}: {', '.join(sorted(found))}; name one")
    return Session(str(found[0]), session_id)


def of_turn(db: sqlite3.Connection, turn_id: str) -> Session | Conversation:
    """Return the session of a turn, else its conversation. Raises LedgerError when there is no such turn."""
    found = db.execute(
        "SELECT request.id, user, session_id, messages FROM turn JOIN request"
        " ON request.id = coalesce(demonstration_of, practice_of, turn.id) WHERE turn_id = ?",
        (turn_id,),
    ).fetchone()
    if found is None:
        raise LedgerError(f"no turn {turn_id!r}")
    row, user, session_id, messages = found
    if session_id is not None:
        return Session(user, session_id)
    told = _without_system(db, unpack_ids(messages))
    question = told[: _first_answer(db, told)]
    if len(question) == len(told):
        later = db.execute(
            "SELECT request.messages FROM next_state JOIN request ON request_id = by_request"
            " WHERE next_state.id = ? AND user = ? AND session_id IS NULL",
            (row, user),
        ).fetchone()
        said = () if later is None else _without_system(db, unpack_ids(later[0]))
        told = said if said[: len(question)] == question else told
    return Conversation(user, row, question, told[len(question)] if len(told) > len(question) else None)


def of_user(db: sqlite3.Connection, user: str) -> Everything:
    """Return all of a user. Raises LedgerError when the ledger has no request of this user."""
    for table in ("request", "side"):
        if db.execute(f"SELECT 1 FROM {table} WHERE user = ? LIMIT 1", (user,)).fetchone() is not None:
            return Everything(user)
    raise LedgerError(f"no user {user!r} ever said anything here")


def _without_system(db: sqlite3.Connection, messages: Ids) -> Ids:
    start = next((at for at, piece in enumerate(messages) if _role(db, piece) not in _SYSTEM), 0)
    return messages[start:]


def _from(db: sqlite3.Connection, first: int, messages: Ids) -> Ids:
    """Return the messages from `first` on, if only system messages precede it; else an empty tuple."""
    if first not in messages[:4]:  # in most requests: then no message is read
        return ()
    start = messages.index(first)
    return messages[start:] if all(_role(db, piece) in _SYSTEM for piece in messages[:start]) else ()


def _first_answer(db: sqlite3.Connection, messages: Ids) -> int:
    """Return the index of the first answer; the number of messages if there is no answer.

    A conversation that begins with an answer has no question: that answer counts as its question.
    """
    return next((at for at, piece in enumerate(messages) if at and _role(db, piece) == "assistant"), len(messages))


def _role(db: sqlite3.Connection, piece: int) -> str:
    return str(orjson.loads(blobs.get(db, [piece])[0])["role"])


def _answered(db: sqlite3.Connection, rows: Sequence[int]) -> Iterator[tuple[int, str | None]]:
    """Yield (row, the request that answered it) for all rows."""
    for some in cut(rows):
        marks, values = in_list(some)
        query = f"SELECT request.id, by_request FROM request LEFT JOIN next_state USING (id) WHERE id IN ({marks})"
        yield from db.execute(query, values).fetchall()


def _with_answers(db: sqlite3.Connection, rows: set[int], requests: Mapping[str, int]) -> set[int]:
    """Add all that is connected with `rows` by pairs of a turn and the request that answered it."""
    pairs: dict[int, list[int]] = {}
    for row, by_request in _answered(db, list(requests.values())):
        if by_request is not None and (by := requests.get(by_request)) is not None:
            pairs.setdefault(row, []).append(by)
            pairs.setdefault(by, []).append(row)
    found, left = set(rows), list(rows)
    while left:
        new = set(pairs.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


def _with_dependents(db: sqlite3.Connection, rows: set[int]) -> frozenset[int]:
    """Add the demonstrations and the practice of these turns, and remove those of other turns: they go with their
    turn."""
    strangers: set[int] = set()
    added: set[int] = set()
    for some in cut(sorted(rows)):
        marks, values = in_list(some)
        for row, demonstration_of, practice_of in db.execute(
            "SELECT id, demonstration_of, practice_of FROM turn"
            f" WHERE (demonstration_of IS NOT NULL OR practice IS NOT NULL) AND id IN ({marks})",
            values,
        ):
            strangers.update(() if (demonstration_of or practice_of) in rows else (row,))
        for column in ("demonstration_of", "practice_of"):
            added.update(row for (row,) in db.execute(f"SELECT id FROM turn WHERE {column} IN ({marks})", values))
    return frozenset((rows - strangers) | added)

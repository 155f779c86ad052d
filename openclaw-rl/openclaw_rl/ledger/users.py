"""Use of the server by each user, in numbers: tokens, requests, turns that wait, wishes. No content."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from openclaw_rl.ledger.store import LedgerPart, read

_LOOKED_AT = 100_000
"""Newest requests, and side requests, of all users that one call looks at."""


@dataclass(slots=True)
class UserUse:
    """Numbers of one user."""

    requests: int = 0
    """Since the time that was asked for: turns and side requests."""
    tokens: int = 0
    """Of their prompts and replies."""
    last_at: float | None = None
    """Time of the newest of them."""
    waiting: dict[str, int] = field(default_factory=dict)
    """Turns that are not over, by state, without practice."""
    wishes: int = 0
    """Active ones."""


class Users(LedgerPart):
    """Reads of one user, and of all of them."""

    @read
    def tokens_since(self, db: sqlite3.Connection, user: str, since: float) -> int:
        """Return the tokens of a user's prompts and replies since then, without practice and demonstrations."""
        turns = db.execute(f"{_TURNS} AND user = ? ORDER BY request.id DESC", (user,))
        return sum(row[2] for row in [*_newer(turns, since), *_sides(db, since)] if row[1] == user)

    @read
    def samples_waiting(self, db: sqlite3.Connection, user: str) -> int:
        """Return the number of a user's samples that wait for a batch, without practice."""
        (n,) = db.execute(
            "SELECT count(*) FROM turn JOIN request USING (id)"
            " WHERE state = 'sampled' AND practice IS NULL AND user = ?",
            (user,),
        ).fetchone()
        return int(n)

    @read
    def users(self, db: sqlite3.Connection, since: float) -> dict[str, UserUse]:
        """Return the numbers of each user who has used the server since then, has turns that wait, or wishes."""
        turns = db.execute(f"{_TURNS} ORDER BY request.id DESC LIMIT ?", (_LOOKED_AT,))
        found: dict[str, UserUse] = {}
        for at, user, tokens in [*_newer(turns, since), *_sides(db, since)]:
            use = found.setdefault(user, UserUse())
            use.requests, use.tokens = use.requests + 1, use.tokens + tokens
            use.last_at = at if use.last_at is None else max(use.last_at, at)
        for user, state, n in db.execute(
            "SELECT user, state, count(*) FROM turn JOIN request USING (id)"
            " WHERE state IN ('served', 'paired', 'judged', 'sampled', 'leased') AND practice IS NULL GROUP BY 1, 2"
        ):
            found.setdefault(user, UserUse()).waiting[state] = n
        active = db.execute("SELECT user FROM wish WHERE state = 'active'")
        for user, n in Counter(user for (user,) in active).items():
            found.setdefault(user, UserUse()).wishes = n
        return found


_TURNS = (
    "SELECT received_at, user, prompt_tokens + ifnull(response_tokens, 0) FROM request LEFT JOIN turn USING (id)"
    " WHERE practice IS NULL AND demonstration_of IS NULL AND outcome <> 'abandoned'"
)


def _newer(rows: sqlite3.Cursor, since: float) -> Iterator[sqlite3.Row]:
    """Yield rows, the newest first, and no further than needed: a user may have a million turns."""
    return takewhile(lambda row: row[0] >= since, rows)


def _sides(db: sqlite3.Connection, since: float) -> Iterator[sqlite3.Row]:
    query = "SELECT at, user, prompt_tokens + completion_tokens FROM side ORDER BY id DESC LIMIT ?"
    return _newer(db.execute(query, (_LOOKED_AT,)), since)

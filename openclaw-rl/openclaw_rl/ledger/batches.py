"""Choice of a batch: the samples of one policy that wait longest, and can be trained on from its tip.

User turns come first; tool turns fill up. Practice waits behind them, and comes a whole update at a time.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from openclaw_rl.ledger.staleness import why_unfit
from openclaw_rl.ledger.states import move
from openclaw_rl.types import SHARED_POLICY, DropReason, TurnState

_SWEEP = 256
"""Waiting samples that one transaction looks at beyond the batch; chats wait until it ends."""

Waiting = tuple[float, int]
"""Time since which a sample waits, and its turn's row."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The policy that a batch is for, and what fits its tip."""

    policy: str
    tip: int
    max_staleness: int


def oldest(db: sqlite3.Connection, *, is_tool: bool, limit: int, policy: str = SHARED_POLICY) -> Iterator[Waiting]:
    """Yield users' samples that wait, the oldest first; rows are read as the caller asks for them."""
    rows = db.execute(
        "SELECT sampled_at, id FROM turn WHERE state = 'sampled' AND practice IS NULL AND of_episode IS NULL"
        " AND policy = ? AND is_tool = ?"
        " ORDER BY sampled_at, id LIMIT ?",
        (policy, is_tool, limit),
    )
    return ((sampled_at, row) for sampled_at, row in rows)


def waiting(db: sqlite3.Connection) -> dict[str, tuple[float, int]]:
    """Return since when users' samples of each policy wait, and how many; the policy that waits longest comes first."""
    query = (
        "SELECT policy, min(sampled_at), count(*) FROM turn WHERE state = 'sampled' AND practice IS NULL"
        " AND of_episode IS NULL GROUP BY policy"
    )
    found = {policy: (since, n) for policy, since, n in db.execute(query)}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def practised(db: sqlite3.Connection) -> list[str]:
    """Return the policies with practice that waits."""
    query = "SELECT DISTINCT policy FROM turn WHERE state = 'sampled' AND practice IS NOT NULL"
    return [policy for (policy,) in db.execute(query)]


def fit(db: sqlite3.Connection, of: Chain, *, is_tool: bool, size: int, at: float) -> list[Waiting] | None:
    """Return the oldest `size` samples that can be trained on. None: some could not, and were dropped."""
    waiting = oldest(db, is_tool=is_tool, limit=size + _SWEEP, policy=of.policy)
    return sifted(db, of, waiting, size=size, at=at)


def practice(db: sqlite3.Connection, of: Chain, *, size: int, at: float) -> list[Waiting] | None:
    """Return the oldest batch of practice. None: some of it could not be trained on, and was dropped."""
    # A batch comes into the ledger in one transaction, so what waits of it is the whole of it.
    where = "FROM turn INDEXED BY turn_practice_waiting WHERE policy = ? AND state = 'sampled' AND practice IS NOT NULL"
    first = db.execute(f"SELECT practice_batch {where} ORDER BY practice_batch LIMIT 1", (of.policy,)).fetchone()
    rows = db.execute(
        f"SELECT sampled_at, id {where} AND practice_batch = ? ORDER BY id LIMIT ?",
        (of.policy, None if first is None else first[0], size),
    )
    waiting = ((sampled_at, row) for sampled_at, row in rows.fetchall())
    return sifted(db, of, waiting, size=size, at=at)


def sifted(
    db: sqlite3.Connection, of: Chain, waiting: Iterable[Waiting], *, size: int, at: float
) -> list[Waiting] | None:
    """Return the first `size` that can be trained on. None: some could not, and were dropped."""
    found: list[Waiting] = []
    unfit: list[tuple[int, DropReason]] = []
    for sampled_at, row in waiting:
        if (reason := why_unfit(db, row, tip=of.tip, max_staleness=of.max_staleness)) is not None:
            unfit.append((row, reason))
        else:
            found.append((sampled_at, row))
            if len(found) == size:
                break
    for row, reason in unfit:
        move(db, row, TurnState.DROPPED, at=at, reason=reason)
    return None if unfit else found


def choose(users: list[Waiting], tools: list[Waiting], size: int, max_tool_share: float) -> list[Waiting]:
    """Choose user turns first; tool turns fill up, as long as t ≤ share · (u + t)."""
    room = size - len(users)
    if max_tool_share < 1:
        room = min(room, int(len(users) * max_tool_share / (1 - max_tool_share) + 1e-9))
    return users + tools[:room]

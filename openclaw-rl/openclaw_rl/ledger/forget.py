"""Forgetting a session, a conversation or a user (`selection`): the requests, turns, samples and feedback, and every
message that nobody else refers to.

Two parts, so that chats do not wait for the long one. `plan` reads, from a snapshot; `carry_out` deletes, in one
transaction, unless more was said meanwhile: then a new plan is needed (`deletion`).

What cannot be taken back: weights that were trained on it. They are named; `untrained` is the newest version before
them. A trainer that holds one of its samples loses its lease. Versions keep the figures of their probes, which are
prompts and replies of the batch, and lose the tokens at once, also those that the gate has yet to look at.

What a ledger lets go of by itself: turns that ended long ago, or the oldest when the file is full.

Only what is over goes: trained in a version that the gate has seen, dropped, or abandoned. What waits for an answer, a
judge or a trainer stays whatever its age; a ledger full of such turns is over its limit, and says so. Reads are from
snapshots, deletions are small transactions between those of chats.

What the ledger lets go of: a session, a conversation or a user to be forgotten, and what is too old or too much.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import orjson

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import deletion, forget_scope, leases, lineage, versions
from openclaw_rl.ledger.blobs import pack_bytes, touch, unpack_bytes
from openclaw_rl.ledger.forget_scope import Selection, cut
from openclaw_rl.ledger.records import Forgotten, Retained
from openclaw_rl.ledger.redaction import NounRedactor
from openclaw_rl.ledger.schema import in_list
from openclaw_rl.ledger.states import DEAD
from openclaw_rl.ledger.store import Clock, LedgerPart, Reader
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.settings import TrainingSettings


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
    target = lineage.rollback_target(db, min(alive) - 1)
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


_PLANS = 5
"""How often a session may go on while it is being forgotten."""
_RETAIN_ROWS = 20_000
"""Let go of in one round; the next one goes on."""


class Deletions(LedgerPart):
    """One deletion at a time."""

    def __init__(
        self, writer: Writer, reader: Reader, training: TrainingSettings, masks: NounRedactor, clock: Clock
    ) -> None:
        super().__init__(writer, reader, training, masks, clock)
        self._deletes = asyncio.Lock()

    async def forget(self, session_id: str, user: str | None = None) -> Forgotten:
        """Delete a session and all that it alone refers to. Raises LedgerError when there is none, when several users
        have one of that name and none is named, or while it is being answered."""
        return await self._forget(lambda db: forget_scope.of_session(db, session_id, user))

    async def forget_turn(self, turn_id: str) -> Forgotten:
        """The same for the session that the turn is part of; without a session id, for its conversation."""
        return await self._forget(lambda db: forget_scope.of_turn(db, turn_id))

    async def forget_user(self, user: str) -> Forgotten:
        """The same for all that the user ever said."""
        return await self._forget(lambda db: forget_scope.of_user(db, user))

    async def _forget(self, select: Callable[[sqlite3.Connection], Selection]) -> Forgotten:
        async with self._deleting():
            for _ in range(_PLANS):
                planned = await self._reader.read(lambda db: plan(db, select))
                done = await self._writer.write(lambda db, planned=planned: carry_out(db, planned, at=self._clock()))  # type: ignore[misc]
                if done is not None:
                    break
            else:
                raise LedgerError(f"{planned.selection} goes on all the time: try again")
        return replace(done, is_scrubbed=await self._writer.alone(deletion.scrub))

    async def rollback_from(self, trained: Collection[int]) -> int | None:
        """Go back behind all of these versions, whose samples wait again; the weights of what was abandoned are
        forgotten. The version that serves from here on; None when none of these was alive."""

        def roll_back(db: sqlite3.Connection) -> int | None:
            to = untrained(db, trained)
            if to is not None:
                lineage.rollback(db, to, requeue=True, at=self._clock())
            return to

        return await self._writer.write(roll_back)

    async def drop_weights(self, after: int) -> list[str]:
        """Of dead versions; the folders that nobody names any more."""
        return await self._writer.write(lambda db: drop_weights(db, after))

    async def retain(self, *, older_than: float | None, most_bytes: int | None) -> Retained:
        """Let go of what ended before `older_than`, and of the oldest that ended while the file has more than
        `most_bytes`. Chats go on meanwhile."""
        turns = pieces = 0
        async with self._deleting():
            rows = await self._reader.read(
                lambda db: choose(db, older_than=older_than, most_bytes=most_bytes, limit=_RETAIN_ROWS)
            )
            if rows:
                doomed = frozenset(rows)
                planned = await self._reader.read(lambda db: deletion.orphans(db, doomed))
                for some in _cut(sorted(rows, reverse=True), 50):
                    turns += await self._writer.write(lambda db, some=some: remove(db, some))  # type: ignore[misc]
                for some in _cut(planned, 1000):
                    pieces += await self._writer.write(lambda db, some=some: deletion.delete_pieces(db, some))  # type: ignore[misc]
        if older_than is not None:
            await self._writer.write(lambda db: deletion.delete_sides(db, "at < ?", (older_than,)))
        used = await self._reader.read(used_bytes)
        return Retained(turns, pieces, used, is_full=most_bytes is not None and used > most_bytes)

    @asynccontextmanager
    async def _deleting(self) -> AsyncIterator[None]:
        """One deletion at a time, and the writer notes what comes to be referred to meanwhile."""
        async with self._deletes:
            await self._writer.write(deletion.watch, is_synced=False)
            try:
                yield
            finally:
                await self._writer.write(deletion.unwatch, is_synced=False)


def _cut(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]

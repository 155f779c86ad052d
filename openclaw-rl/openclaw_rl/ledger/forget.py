"""Deletion of turns: of a session, a conversation or a user on request; of the oldest by age and size.

Forgetting deletes the requests, turns, samples, feedback and wishes of a `selection`, the practice on its prompts, and
every message that no other request refers to. It has two parts, so that chats do not wait for the long one: `plan`
reads, from a snapshot; `carry_out` deletes, in one transaction, unless the selection grew meanwhile: then a new plan is
needed (`deletion`).

Weights that were trained on the turns cannot be taken back. `Forgotten` names their versions; `untrained` finds the
newest version before them. A user's own policy goes with the user, weights and all. A trainer that holds one of the
samples loses its lease, unless its optimizer steps at that moment: then the deletion waits for the commit. Versions
keep the figures of their probes, which are prompts and replies of the batch, and lose the tokens at once, also before
the gate has read them.

Retention deletes turns that ended long ago, or the oldest when the file is over its limit. Only turns that are over go:
trained in a version that the gate has seen and that no crash can lose, dropped, or abandoned. A turn that waits for an
answer, a judge, its group or a trainer stays at any age; a ledger full of such turns is over its limit and reports it.
Reads are from snapshots, deletions are small transactions between those of chats.
"""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import orjson

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import deletion, episodes, forget_scope, leases, lineage, pictures, policies, versions
from openclaw_rl.ledger.blobs import Watch, pack_bytes, touch, unpack_bytes
from openclaw_rl.ledger.forget_scope import Selection
from openclaw_rl.ledger.records import Forgotten, Retained
from openclaw_rl.ledger.redaction import NounRedactor
from openclaw_rl.ledger.schema import cut, in_list
from openclaw_rl.ledger.states import DEAD
from openclaw_rl.ledger.store import Clock, LedgerPart, Reader, read, write
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.types import own_policy

_OVER = (
    "(request.outcome = 'abandoned' AND turn.id IS NULL OR turn.state = 'dropped' OR turn.state = 'trained' AND"
    " trained_in IN (SELECT weight_version FROM version WHERE state NOT IN ('candidate', 'gated', 'loading'))"
    # A crash loses the versions after the newest durable one, and their turns wait again.
    " AND trained_in <= (SELECT max(weight_version) FROM version WHERE durable AND state NOT IN"
    " ('rejected', 'rolled_back', 'lost')))"
    # The credit of a group compares all its steps, also those that were dropped.
    " AND NOT EXISTS (SELECT 1 FROM episode JOIN episode_group ON episode_group.id = grp"
    " WHERE episode.id = in_episode AND episode_group.state <> 'scored')"
)
_SPARE = 0.05
"""Share of the limit by which a file over its limit is brought below it."""
_PLANS = 5
"""Plans for one forgetting: each is void if the session went on while it was made."""
_STEP_POLL_S = 0.05
_RETAIN_ROWS = 20_000
"""Requests deleted in one round of retention; the next round continues."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Rows to delete, and the newest rows that the plan has read."""

    selection: Selection
    rows: frozenset[int]
    orphans: tuple[int, ...]
    newest_request: int
    newest_piece: int


class Forgetting(LedgerPart):
    """Deletions, one at a time."""

    def __init__(
        self, writer: Writer, reader: Reader, training: TrainingSettings, redactor: NounRedactor, clock: Clock
    ) -> None:
        super().__init__(writer, reader, training, redactor, clock)
        self._deletes = asyncio.Lock()

    async def forget(self, session_id: str, user: str | None = None) -> Forgotten:
        """Delete a session and the contents that it alone refers to.

        Raises LedgerError when there is no such session, while one of its requests is running, or when several users
        have a session of that name and `user` is None.
        """
        return await self._forget(lambda db: forget_scope.of_session(db, session_id, user))

    async def forget_turn(self, turn_id: str) -> Forgotten:
        """Delete the session of a turn, or its conversation if it has no session id; as `forget`."""
        return await self._forget(lambda db: forget_scope.of_turn(db, turn_id))

    async def forget_user(self, user: str) -> Forgotten:
        """Delete all sessions and conversations of a user; as `forget`."""
        return await self._forget(lambda db: forget_scope.of_user(db, user))

    async def _forget(self, select: Callable[[sqlite3.Connection], Selection]) -> Forgotten:
        async with self._deleting():
            for _ in range(_PLANS):
                planned = await self._reader.read(partial(_plan, select=select))
                done = await self._carry_out(planned)
                if done is not None:
                    break
                await self._step_over()
            else:
                raise LedgerError(f"{planned.selection} goes on all the time: try again")
        # VACUUM needs a moment without a transaction, between two groups of the writer.
        return replace(done, is_scrubbed=await self._writer.alone(deletion.scrub))

    async def _step_over(self) -> None:
        """Wait for the commit of the step that runs, or for the end of its time."""
        # Asked, not told: a lease ends in six ways, in the transactions of other parts.
        while time.monotonic() < self._step[1] and await self._is_live(self._step[0]):  # noqa: ASYNC110
            await asyncio.sleep(_STEP_POLL_S)

    @read
    def _is_live(self, db: sqlite3.Connection, fence: int) -> bool:
        return db.execute("SELECT 1 FROM lease WHERE fence = ? AND state = 'live'", (fence,)).fetchone() is not None

    @write
    def _carry_out(self, db: sqlite3.Connection, plan: _Plan) -> Forgotten | None:
        """Delete the planned rows. None: make a new plan, as the selection has grown, or an optimizer steps on it."""
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
        fence, until = self._step
        if fence in fences and time.monotonic() < until:
            return None  # the step is made: revoked now, it would be in weights whose commit is refused
        for fence in fences:
            leases.end(db, fence, "revoked", reason="a session was forgotten", at=self._clock())
        turns = deletion.delete_rows(db, rows)
        removed: list[int] = []
        if isinstance(selection, forget_scope.Everything):
            episodes.delete_user(db, selection.user)
            removed = policies.remove(db, own_policy(selection.user), at=self._clock())
        if selection.sides is not None:
            deletion.delete_sides(db, *selection.sides)
        pieces = deletion.delete_pieces(db, plan.orphans)
        _clear_probes(db, numbers)
        trained_in = tuple(sorted(numbers.difference(removed)))
        began = tuple(policies.began_with(db, trained_in))
        return Forgotten(selection.user, selection.session_id, turns, pieces, trained_in, tuple(removed), began)

    @write
    def rollback_from(self, db: sqlite3.Connection, trained: Collection[int]) -> dict[str, int]:
        """Roll back each policy of these versions to the newest one before them; samples of the abandoned wait again.

        Return the version that serves each of these policies from now on; empty: none of the versions was alive.
        """
        found = _untrained(db, trained)
        for to in found.values():
            lineage.roll_back(db, to, requeue=True, at=self._clock())
        return found

    @write
    def drop_weights(self, db: sqlite3.Connection, after: int) -> list[str]:
        """Remove the folders of dead versions after `after`; return those that no version has any more."""
        dead = ", ".join(f"'{state}'" for state in DEAD)
        found = db.execute(
            "SELECT DISTINCT folder FROM version WHERE folder IS NOT NULL AND weight_version > ?"
            f" AND state IN ({dead})",
            (after,),
        ).fetchall()
        db.execute(
            f"UPDATE version SET folder = NULL, has_optimizer = 0 WHERE weight_version > ? AND state IN ({dead})",
            (after,),
        )
        return [
            str(folder)
            for (folder,) in found
            if not db.execute("SELECT 1 FROM version WHERE folder = ?", (folder,)).fetchone()
        ]

    async def retain(self, *, older_than: float | None, most_bytes: int | None) -> Retained:
        """Delete turns that ended before `older_than`, and the oldest that ended while the file has more than
        `most_bytes`. Chats continue meanwhile."""
        turns = pieces = 0
        async with self._deleting():
            rows = await self._reader.read(
                lambda db: _choose(db, older_than=older_than, most_bytes=most_bytes, limit=_RETAIN_ROWS)
            )
            if rows:
                doomed = frozenset(rows)
                planned = await self._reader.read(lambda db: deletion.orphans(db, doomed))
                for some in cut(sorted(rows, reverse=True), 50):
                    turns += await self._delete_ended(some)
                for some in cut(planned, 1000):
                    pieces += await self._writer.write(partial(deletion.delete_pieces, planned=some))
                await self._writer.alone(pictures.sweep)
        if older_than is not None:
            await self._writer.write(lambda db: deletion.delete_sides(db, "at < ?", (older_than,)))
        used = await self._reader.read(used_bytes)
        return Retained(turns, pieces, used, is_full=most_bytes is not None and used > most_bytes)

    @write
    def _delete_ended(self, db: sqlite3.Connection, rows: Sequence[int]) -> int:
        """Delete those of the rows that are still over, and keep the pieces of the others; return the deleted turns."""
        marks, values = in_list(rows)
        over = {
            row
            for (row,) in db.execute(
                f"SELECT id FROM request LEFT JOIN turn USING (id) WHERE {_OVER} AND id IN ({marks})"
                # a demonstration or a practice reply that stays keeps the turn that it is of
                " AND NOT EXISTS (SELECT 1 FROM turn AS demo WHERE demo.demonstration_of = request.id"
                f" AND demo.id NOT IN ({marks}))"
                " AND NOT EXISTS (SELECT 1 FROM turn AS again WHERE again.practice_of = request.id"
                f" AND again.id NOT IN ({marks}))",
                (*values, *values, *values),
            )
        }
        touch(db, deletion.pieces_of(db, set(rows) - over))
        return deletion.delete_rows(db, over)

    @asynccontextmanager
    async def _deleting(self) -> AsyncIterator[None]:
        """Hold the lock of deletions; meanwhile the writer notes old pieces that rows come to refer to."""
        async with self._deletes:
            watch = Watch()
            try:
                await self._writer.write(partial(deletion.watch, by=watch), is_synced=False)
                yield
            finally:  # a flag and no write: it also ends the watch when the file cannot be written
                watch.is_over = True


def _plan(db: sqlite3.Connection, select: Callable[[sqlite3.Connection], Selection]) -> _Plan:
    """Read every row once and plan a deletion. Raises LedgerError when the selection does not exist."""
    selection = select(db)
    (newest_request,) = db.execute("SELECT coalesce(max(id), 0) FROM request").fetchone()
    (newest_piece,) = db.execute("SELECT coalesce(max(id), 0) FROM piece").fetchone()
    rows = selection.rows(db)
    return _Plan(selection, rows, tuple(deletion.orphans(db, rows)), newest_request, newest_piece)


def _untrained(db: sqlite3.Connection, trained: Collection[int]) -> dict[str, int]:
    """Return, by policy, the newest version before all of these that a rollback can go to.

    Policies of dead versions alone need no rollback. Raises LedgerError when only the base is left of one.
    """
    rows = [versions.row(db, number) for number in sorted(trained)]
    first: dict[str, sqlite3.Row] = {}
    for row in rows:
        if row["state"] not in DEAD:
            first.setdefault(row["policy"], row)
    # The parent, not the number before: that may be of another policy.
    return {policy: lineage.way_back(db, row["parent"]) for policy, row in first.items()}


def _clear_probes(db: sqlite3.Connection, numbers: Collection[int]) -> None:
    """Remove the tokens from the probes of versions; the gate may still need the figures."""
    with deletion.zeroed(db):
        for number in numbers:
            packed = versions.row(db, number)["probes"]
            if packed is None:
                continue
            probes = [probe | {"prompt_ids": [], "response_ids": []} for probe in orjson.loads(unpack_bytes(packed))]
            db.execute(
                "UPDATE version SET probes = ? WHERE weight_version = ?", (pack_bytes(orjson.dumps(probes)), number)
            )


def used_bytes(db: sqlite3.Connection) -> int:
    """Return the size of the file without its free pages, and of the pictures."""
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size) + pictures.used_bytes(db)


def _choose(db: sqlite3.Connection, *, older_than: float | None, most_bytes: int | None, limit: int) -> list[int]:
    """Return at most `limit` requests that may be deleted, oldest first."""
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

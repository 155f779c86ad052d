"""What the ledger lets go of: a session, a conversation or a user to be forgotten, and what is too old or too much."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import chain, deletion, forget, retention, selection
from openclaw_rl.ledger.face import Clock, Face
from openclaw_rl.ledger.masks import Masks
from openclaw_rl.ledger.reader import Reader
from openclaw_rl.ledger.records import Forgotten, Retained
from openclaw_rl.ledger.selection import Selection
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.settings import TrainingSettings

_PLANS = 5
"""How often a session may go on while it is being forgotten."""
_RETAIN_ROWS = 20_000
"""Let go of in one round; the next one goes on."""


class DeletionFace(Face):
    """One deletion at a time."""

    def __init__(self, writer: Writer, reader: Reader, training: TrainingSettings, masks: Masks, clock: Clock) -> None:
        super().__init__(writer, reader, training, masks, clock)
        self._deletes = asyncio.Lock()

    async def forget(self, session_id: str, user: str | None = None) -> Forgotten:
        """Delete a session and all that it alone refers to. Raises LedgerError when there is none, when several users
        have one of that name and none is named, or while it is being answered."""
        return await self._forget(lambda db: selection.of_session(db, session_id, user))

    async def forget_turn(self, turn_id: str) -> Forgotten:
        """The same for the session that the turn is part of; without a session id, for its conversation."""
        return await self._forget(lambda db: selection.of_turn(db, turn_id))

    async def forget_user(self, user: str) -> Forgotten:
        """The same for all that the user ever said."""
        return await self._forget(lambda db: selection.of_user(db, user))

    async def _forget(self, select: Callable[[sqlite3.Connection], Selection]) -> Forgotten:
        async with self._deleting():
            for _ in range(_PLANS):
                plan = await self._reader.read(lambda db: forget.plan(db, select))
                done = await self._writer.write(lambda db, plan=plan: forget.carry_out(db, plan, at=self._clock()))  # type: ignore[misc]
                if done is not None:
                    break
            else:
                raise LedgerError(f"{plan.selection} goes on all the time: try again")
        return replace(done, is_scrubbed=await self._writer.alone(deletion.scrub))

    async def rollback_from(self, trained: Collection[int]) -> int | None:
        """Go back behind all of these versions, whose samples wait again; the weights of what was abandoned are
        forgotten. The version that serves from here on; None when none of these was alive."""

        def roll_back(db: sqlite3.Connection) -> int | None:
            to = forget.untrained(db, trained)
            if to is not None:
                chain.rollback(db, to, requeue=True, at=self._clock())
            return to

        return await self._writer.write(roll_back)

    async def drop_weights(self, after: int) -> list[str]:
        """Of dead versions; the folders that nobody names any more."""
        return await self._writer.write(lambda db: forget.drop_weights(db, after))

    async def retain(self, *, older_than: float | None, most_bytes: int | None) -> Retained:
        """Let go of what ended before `older_than`, and of the oldest that ended while the file has more than
        `most_bytes`. Chats go on meanwhile."""
        turns = pieces = 0
        async with self._deleting():
            rows = await self._reader.read(
                lambda db: retention.choose(db, older_than=older_than, most_bytes=most_bytes, limit=_RETAIN_ROWS)
            )
            if rows:
                doomed = frozenset(rows)
                planned = await self._reader.read(lambda db: deletion.orphans(db, doomed))
                for some in _cut(sorted(rows, reverse=True), 50):
                    turns += await self._writer.write(lambda db, some=some: retention.remove(db, some))  # type: ignore[misc]
                for some in _cut(planned, 1000):
                    pieces += await self._writer.write(lambda db, some=some: deletion.delete_pieces(db, some))  # type: ignore[misc]
        if older_than is not None:
            await self._writer.write(lambda db: deletion.delete_sides(db, "at < ?", (older_than,)))
        used = await self._reader.read(retention.used_bytes)
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

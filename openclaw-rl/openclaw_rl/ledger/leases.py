"""Leases: batches handed to trainers.

At most one lease of a policy is live. Its samples are LEASED, and nobody else gets them. It ends by a commit
(`chain`), by `release`, by its deadline, or by being revoked (its trainer is known to be dead, or its parent is no
longer on the way to the tip); then what it held waits again, in the old order. A lease past its deadline is over when
somebody asks for the next one, or at the next start: until then its trainer may still renew or commit, so that a laptop
that slept, or a clock that jumped, costs no step. A trainer that asks for a lease holds none: one that is live in its
name is over.

`fence` grows with every lease. Whoever comes with an older one, or with a lease that ended, is refused.

A trainer's way through the ledger: tip, lease, commit, durable.
"""

import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from openclaw_rl.errors import CommitRefused, LedgerUnavailable
from openclaw_rl.ledger import feedback, lineage, schema, versions
from openclaw_rl.ledger.records import read_sample, read_versions_of
from openclaw_rl.ledger.states import move
from openclaw_rl.ledger.store import LedgerPart
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.trainer_protocol import Commit, Tip
from openclaw_rl.types import DropReason, Lease, TurnState, Version

_SWEEP = 256
"""Waiting samples looked at beyond the batch in one transaction; chats wait behind it."""


_Waiting = tuple[float, int]
"""Since when, and the turn's row."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease on disk, its samples not yet read: that is no work for the writer."""

    lease_id: str
    fence: int
    parent: int
    expires_at: float
    rows: tuple[int, ...]


class Again(Enum):
    """So many samples were dropped that the batch may not be complete: ask again, in a transaction of its own."""

    AGAIN = "again"


AGAIN: Final = Again.AGAIN


def grant(
    db: sqlite3.Connection, training: TrainingSettings, *, trainer: str, n: int | None, now: bool, at: float
) -> Grant | Again | None:
    if not training.enabled or not schema.get_int(db, "learning", 1):
        return None
    live = db.execute("SELECT fence, trainer, expires_at FROM lease WHERE state = 'live'").fetchone()
    if live is not None:
        if live["trainer"] == trainer:  # the answer that gave it was lost, or the trainer died before it noted it down
            end(db, live["fence"], "revoked", reason="its trainer asked for another", at=at)
        elif live["expires_at"] > at:
            return None
        else:
            expire(db, at=at)
    size = n or training.batch_size
    tip = schema.get_int(db, "tip")
    waiting: dict[bool, list[_Waiting]] = {False: [], True: []}
    has_dropped = False
    for is_tool, fit in waiting.items():
        unfit: list[tuple[int, DropReason]] = []
        for sampled_at, row in oldest(db, is_tool=is_tool, limit=size + _SWEEP):
            if (reason := _unfit(db, row, tip, training.max_staleness)) is None:
                fit.append((sampled_at, row))
                if len(fit) == size:
                    break
            else:
                unfit.append((row, reason))
        for row, reason in unfit:
            move(db, row, TurnState.DROPPED, at=at, reason=reason)
        has_dropped = has_dropped or bool(unfit)
    if has_dropped:
        return AGAIN
    chosen = _choose(waiting[False], waiting[True], size, training.max_tool_share)
    is_late = bool(chosen) and at - min(chosen)[0] >= training.max_wait_s
    needed = 1 if now else min(training.min_batch, size) if is_late else size
    if len(chosen) < needed:
        return None
    return _insert(db, [row for _, row in sorted(chosen)], trainer, tip, at=at, lease_s=training.lease_s)


def read(db: sqlite3.Connection, grant: Grant, *, lease_s: float) -> Lease:
    return Lease(
        lease_id=grant.lease_id,
        fence=grant.fence,
        parent=grant.parent,
        expires_at=grant.expires_at,
        lease_s=lease_s,
        samples=tuple(sample for row in grant.rows if (sample := read_sample(db, row)) is not None),
    )


def overdue(db: sqlite3.Connection, *, at: float) -> str | None:
    """The trainer that has let its lease run out without a word."""
    row = db.execute("SELECT trainer FROM lease WHERE state = 'live' AND expires_at < ?", (at,)).fetchone()
    return None if row is None else str(row[0])


def held(db: sqlite3.Connection, fence: int) -> Grant:
    """A live lease, as it was granted. Raises CommitRefused when it is over."""
    found = db.execute("SELECT lease_id FROM lease WHERE fence = ?", (fence,)).fetchone()
    lease_id = f"of fence {fence}" if found is None else str(found["lease_id"])
    row = live(db, lease_id, fence)
    query = (
        "SELECT turn FROM lease_sample JOIN turn ON turn = id WHERE fence = ? AND outcome = 'leased'"
        " ORDER BY sampled_at, turn"
    )
    turns = tuple(turn for (turn,) in db.execute(query, (fence,)))
    return Grant(lease_id=lease_id, fence=fence, parent=row["parent"], expires_at=row["expires_at"], rows=turns)


def renew(db: sqlite3.Connection, lease_id: str, fence: int, *, at: float, lease_s: float) -> float:
    live(db, lease_id, fence)
    db.execute("UPDATE lease SET expires_at = ? WHERE lease_id = ?", (at + lease_s, lease_id))
    return at + lease_s


def release(
    db: sqlite3.Connection, lease_id: str, fence: int, *, reason: str, drop: Mapping[str, DropReason], at: float
) -> None:
    """Idempotent: a release that is said twice is one."""
    over = db.execute("SELECT state FROM lease WHERE lease_id = ? AND fence = ?", (lease_id, fence)).fetchone()
    if over is not None and over["state"] == "released":
        return
    live(db, lease_id, fence)
    drop_leased(db, fence, drop, at=at)
    end(db, fence, "released", reason=reason, at=at)


def revoke(
    db: sqlite3.Connection, *, trainer: str | None, parents: frozenset[int] | None, reason: str, at: float
) -> bool:
    """End the live lease if it is this trainer's, or builds on one of these parents; both None: whosever it is."""
    found = db.execute("SELECT fence, trainer, parent FROM lease WHERE state = 'live'").fetchone()
    if (
        found is None
        or trainer not in (None, found["trainer"])
        or (parents is not None and found["parent"] not in parents)
    ):
        return False
    end(db, found["fence"], "revoked", reason=reason, at=at)
    return True


def expire(db: sqlite3.Connection, *, at: float) -> None:
    """End the live lease if its deadline has passed."""
    found = db.execute("SELECT fence FROM lease WHERE state = 'live' AND expires_at <= ?", (at,)).fetchone()
    if found is not None:
        end(db, found["fence"], "expired", reason="not renewed in time", at=at)


def bound(db: sqlite3.Connection, *, until: float) -> None:
    """The live lease ends by then: it may have been granted under a wall clock that was set back since."""
    db.execute("UPDATE lease SET expires_at = min(expires_at, ?) WHERE state = 'live'", (until,))


def live(db: sqlite3.Connection, lease_id: str, fence: int) -> sqlite3.Row:
    """The lease's row. Raises CommitRefused when it is over, or the fence is another lease's."""
    found: sqlite3.Row | None = db.execute("SELECT * FROM lease WHERE lease_id = ?", (lease_id,)).fetchone()
    if found is None:
        raise CommitRefused(f"no lease {lease_id}")
    if found["fence"] != fence:
        raise CommitRefused(f"lease {lease_id} has fence {found['fence']}, not {fence}")
    if found["state"] != "live":
        raise CommitRefused(
            f"lease {lease_id} is {found['state']}" + (f": {found['reason']}" if found["reason"] else "")
        )
    return found


def live_id(db: sqlite3.Connection) -> str | None:
    """The lease that may yet be committed."""
    found = db.execute("SELECT lease_id FROM lease WHERE state = 'live'").fetchone()
    return None if found is None else str(found["lease_id"])


def drop_leased(db: sqlite3.Connection, fence: int, drop: Mapping[str, DropReason], *, at: float) -> None:
    """Samples the trainer can never use end here."""
    for sample_id, reason in drop.items():
        turn = db.execute(
            "SELECT turn FROM lease_sample JOIN turn ON turn = id"
            " WHERE turn_id = ? AND fence = ? AND outcome = 'leased'",
            (sample_id, fence),
        ).fetchone()
        if turn is None:
            raise CommitRefused(f"sample {sample_id} is not in this lease")
        db.execute("UPDATE lease_sample SET outcome = 'dropped' WHERE fence = ? AND turn = ?", (fence, turn[0]))
        move(db, turn[0], TurnState.DROPPED, at=at, reason=reason, detail="by the trainer")


def end(db: sqlite3.Connection, fence: int, state: str, *, reason: str | None, at: float) -> None:
    """Close the lease; what it still holds waits again."""
    for (turn,) in db.execute(
        "SELECT turn FROM lease_sample WHERE fence = ? AND outcome = 'leased'", (fence,)
    ).fetchall():
        move(db, turn, TurnState.SAMPLED, at=at, detail=f"lease {state}")
        feedback.catch_up(db, turn, at=at)
    db.execute("UPDATE lease_sample SET outcome = 'returned' WHERE fence = ? AND outcome = 'leased'", (fence,))
    db.execute("UPDATE lease SET state = ?, reason = ?, ended_at = ? WHERE fence = ?", (state, reason, at, fence))


def oldest(db: sqlite3.Connection, *, is_tool: bool, limit: int) -> Iterator[_Waiting]:
    """Samples that wait, the oldest first, read as they are asked for."""
    rows = db.execute(
        "SELECT sampled_at, id FROM turn WHERE state = 'sampled' AND is_tool = ? ORDER BY sampled_at, id LIMIT ?",
        (is_tool, limit),
    )
    return ((sampled_at, row) for sampled_at, row in rows)


def _unfit(db: sqlite3.Connection, row: int, tip: int, max_staleness: int) -> DropReason | None:
    """A demonstration always fits: no version sampled it."""
    if db.execute("SELECT is_demonstration FROM sample WHERE id = ?", (row,)).fetchone()[0]:
        return None
    sampled_by = {run.weight_version for run in read_versions_of(db, row)}
    depths = [depth for version in sampled_by if (depth := versions.depth(db, version)) is not None]
    if len(depths) < len(sampled_by):
        return DropReason.ROLLED_BACK
    return DropReason.STALE if (versions.depth(db, tip) or 0) - min(depths) > max_staleness else None


def _choose(users: list[_Waiting], tools: list[_Waiting], size: int, max_tool_share: float) -> list[_Waiting]:
    """User turns first; tool turns fill up, as long as t ≤ share · (u + t)."""
    room = size - len(users)
    if max_tool_share < 1:
        room = min(room, int(len(users) * max_tool_share / (1 - max_tool_share) + 1e-9))
    return users + tools[:room]


def _insert(db: sqlite3.Connection, rows: list[int], trainer: str, parent: int, *, at: float, lease_s: float) -> Grant:
    fence = schema.get_int(db, "fence") + 1
    schema.put(db, "fence", fence)
    lease_id = f"lease-{fence}-{secrets.token_hex(4)}"
    db.execute(
        "INSERT INTO lease (lease_id, fence, trainer, parent, state, granted_at, expires_at)"
        " VALUES (?, ?, ?, ?, 'live', ?, ?)",
        (lease_id, fence, trainer, parent, at, at + lease_s),
    )
    for row in rows:
        move(db, row, TurnState.LEASED, at=at, detail=lease_id)
        db.execute("INSERT INTO lease_sample (fence, turn) VALUES (?, ?)", (fence, row))
    return Grant(lease_id=lease_id, fence=fence, parent=parent, expires_at=at + lease_s, rows=tuple(rows))


class Leases(LedgerPart):
    """From samples to a version."""

    async def tip(self) -> Tip:
        """What to train from."""
        return await self._reader.read(versions.tip)

    async def lease(self, *, trainer: str, n: int | None = None, now: bool = False) -> Lease | None:
        """A batch: `n` (else `batch_size`) samples, or after `max_wait_s` at least `min_batch`; with `now` whatever
        waits. User turns first, tool turns up to `max_tool_share` of the batch. None while too few wait, another
        trainer's lease is live, or learning is paused; the same trainer's is over, since who asks holds none. Waiting
        samples that are too old, or that no ancestor of the tip sampled, are dropped on the way."""
        while True:
            granted = await self._writer.write(
                lambda db: grant(db, self._training, trainer=trainer, n=n, now=now, at=self._clock())
            )
            if granted is None:
                return None
            if isinstance(granted, Grant):
                return await self._read_lease(granted)

    async def _read_lease(self, grant: Grant) -> Lease:
        try:
            return await self._reader.read(lambda db: read(db, grant, lease_s=self._training.lease_s))
        except LedgerUnavailable:
            await self.release(grant.lease_id, grant.fence, reason="its samples could not be read")
            raise

    async def leased(self, fence: int) -> Lease:
        """A live lease once more. Raises CommitRefused when it is over."""
        lease_s = self._training.lease_s
        return await self._reader.read(lambda db: read(db, held(db, fence), lease_s=lease_s))

    async def renew(self, lease_id: str, fence: int) -> float:
        """The new deadline. Raises CommitRefused when the lease is over."""
        lease_s = self._training.lease_s
        return await self._writer.write(lambda db: renew(db, lease_id, fence, at=self._clock(), lease_s=lease_s))

    async def release(
        self, lease_id: str, fence: int, *, reason: str, drop: Mapping[str, DropReason] | None = None
    ) -> None:
        """The samples wait again, but for those in `drop`. Raises CommitRefused when the lease is over otherwise."""
        dropped = drop or {}
        await self._writer.write(lambda db: release(db, lease_id, fence, reason=reason, drop=dropped, at=self._clock()))

    async def live_lease(self) -> str | None:
        """The id of the lease that may yet be committed."""
        return await self._reader.read(live_id)

    async def overdue(self) -> str | None:
        """The name of the trainer that has let its lease run out without a word: it hangs, or is gone."""
        return await self._reader.read(lambda db: overdue(db, at=self._clock()))

    async def revoke(self, *, trainer: str | None = None, reason: str) -> bool:
        """End the live lease of a trainer known to be dead (None: whosever it is); its samples wait again. False when
        there is none."""
        return await self._writer.write(
            lambda db: revoke(db, trainer=trainer, parents=None, reason=reason, at=self._clock())
        )

    async def commit(self, commit: Commit) -> int:
        """One transaction: the fence is the newest, the parent is the tip; the samples are TRAINED in a new version, a
        candidate. The same lease_id again gives the same version. Raises CommitRefused."""
        return await self._writer.write(lambda db: lineage.commit(db, commit, at=self._clock()))

    async def durable(self, weight_version: int) -> None:
        """The trainer can go on from it after a crash."""
        await self._writer.write(lambda db: lineage.durable(db, weight_version))

    async def lose_undurable(self, reason: str) -> Version | None:
        """The trainer crashed: versions behind the last durable one are LOST, their samples wait again, and the durable
        weights go on (and serve) under a new number. None when nothing was lost."""

        def lose(db: sqlite3.Connection) -> Version | None:
            number = lineage.lose_undurable(db, reason, at=self._clock())
            return None if number is None else versions.read(db, number)

        return await self._writer.write(lose)

"""Leases: batches that a trainer holds.

At most one lease is live; its samples are LEASED and of one policy, and no other lease has them. It ends by a commit
(`lineage`), by `release`, by its deadline, or by being revoked: its trainer is dead, or its parent is no longer the tip
or an ancestor of it. Its samples then wait again, in the old order.

Practice waits behind the users' samples, and is leased a whole batch at a time.

A lease past its deadline stays live until another trainer asks for one, or until the next start of the server. Until
then its trainer may still renew or commit: a laptop that slept, or a clock that jumped, loses no step. A trainer that
asks for a lease holds none: a live lease in its name is revoked.

`fence` grows with every lease. A call with an older fence, or for a lease that ended, is refused.
"""

import secrets
import sqlite3
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from openclaw_rl.errors import CommitRefused, LedgerUnavailable
from openclaw_rl.ledger import batches, feedback, groups, schema, versions
from openclaw_rl.ledger.batches import Chain, Waiting
from openclaw_rl.ledger.records import read_sample
from openclaw_rl.ledger.states import move
from openclaw_rl.ledger.store import LedgerPart, read, write
from openclaw_rl.types import SHARED_POLICY, DropReason, Lease, TurnState

STEP_S = 30.0
"""Longest wait of a deletion for the commit of an optimizer's step. An optimizer takes seconds, not its whole step."""


@dataclass(frozen=True, slots=True)
class _Grant:
    """A lease on disk without its samples: a reader reads those, so that the writer stays free for chats."""

    lease_id: str
    policy: str
    fence: int
    parent: int
    expires_at: float
    rows: tuple[int, ...]


class _Again(Enum):
    """Result of a transaction that dropped samples and granted no lease: the caller asks again."""

    AGAIN = "again"


_AGAIN: Final = _Again.AGAIN


class Leases(LedgerPart):
    """Batches of samples that a trainer leases, renews and releases."""

    async def lease(
        self, *, trainer: str, n: int | None = None, now: bool = False, most: int | None = None
    ) -> Lease | None:
        """Grant a batch of `n` samples (default `batch_size`), or of whole groups of episodes.

        After `max_wait_s` a batch needs only `min_batch` samples, and with `now` only one. User turns come first; tool
        turns fill up to `max_tool_share` of the batch. Next come `episodes.groups_per_step` whole groups, of at most
        `most` samples. Where these are too few for a batch, a batch of practice that
        waits is granted whole, and they fill it up. Samples that are too old, or that no ancestor of the tip sampled,
        are dropped on the way. None while too few samples wait, another trainer's lease is live, or learning is paused.
        """
        while (granted := await self._grant(trainer, n, now, most)) is _AGAIN:
            pass
        return None if granted is None else await self._read_granted(granted)

    @write
    def _grant(
        self, db: sqlite3.Connection, trainer: str, n: int | None, now: bool, most: int | None
    ) -> _Grant | _Again | None:
        at, training = self._clock(), self._training
        if not training.enabled or not learns(db):
            return None
        live = db.execute("SELECT fence, trainer, expires_at FROM lease WHERE state = 'live'").fetchone()
        if live is not None:
            if live["trainer"] == trainer:  # the answer to its last call was lost, or the trainer restarted
                end(db, live["fence"], "revoked", reason="its trainer asked for another", at=at)
            elif live["expires_at"] > at:
                return None
            else:
                expire(db, at=at)
        size = n or training.batch_size
        newest = db.execute("SELECT policy, state FROM lease WHERE fence = (SELECT max(fence) FROM lease)").fetchone()
        # A policy whose batch was given back goes behind the others: with damaged files it would wait longest for ever.
        last = newest["policy"] if newest is not None and newest["state"] == "released" else None
        # Users' samples of every policy go before practice of any.
        for has_practice in (False, True):
            due = self._due(db, size, now=now, has_practice=has_practice, at=at)
            for policy in sorted(due, key=lambda one: one == last):
                if not learns(db, policy):
                    continue
                tip = versions.tip_of(db, policy)
                of = Chain(policy, tip, training.max_staleness)
                rows = self._batch(db, of, size, now=now, most=most, has_practice=has_practice, at=at)
                if rows is _AGAIN:
                    return _AGAIN
                if rows:
                    return _insert(db, sorted(rows), trainer, of, at=at, lease_s=training.lease_s)
        return None

    def _due(self, db: sqlite3.Connection, size: int, *, now: bool, has_practice: bool, at: float) -> list[str]:
        """Return the policies that may have a batch, the one that waits longest first.

        Of many policies most have too few samples, and to look at each sample would hold up the chats' writes.
        """
        training, waiting = self._training, batches.waiting(db)
        if has_practice:
            practised = batches.practised(db)
            return [policy for policy in waiting if policy in practised] + [
                policy for policy in practised if policy not in waiting
            ]
        least = 1 if now else min(training.min_batch, size)
        due = [
            policy
            for policy, (since, count) in waiting.items()
            if count >= (least if now or at - since >= training.max_wait_s else size)
        ]
        return due if SHARED_POLICY in due else [*due, SHARED_POLICY]  # episodes train it, whatever else waits

    def _batch(
        self,
        db: sqlite3.Connection,
        of: Chain,
        size: int,
        *,
        now: bool,
        most: int | None,
        has_practice: bool,
        at: float,
    ) -> list[Waiting] | _Again:
        """Return the samples of a batch of one policy; [] while too few wait."""
        training = self._training
        users, tools = (batches.fit(db, of, is_tool=is_tool, size=size, at=at) for is_tool in (False, True))
        if users is None or tools is None:
            return _AGAIN
        chosen = batches.choose(users, tools, size, training.max_tool_share)
        is_late = bool(chosen) and at - min(chosen)[0] >= training.max_wait_s
        needed = 1 if now else min(training.min_batch, size) if is_late else size
        if len(chosen) < needed:
            # Episodes train the shared policy.
            steps = self._groups(db, of, most=most, now=now, at=at) if of.policy == SHARED_POLICY else []
            if steps is None:
                return _AGAIN
            if steps or not has_practice:
                return steps
            practice = batches.practice(db, of, size=size, at=at)
            if practice is None:
                return _AGAIN
            return chosen[: size - len(practice)] + practice if practice else []
        return chosen

    def _groups(
        self, db: sqlite3.Connection, of: Chain, *, most: int | None, now: bool, at: float
    ) -> list[Waiting] | None:
        """Return the steps of a batch of whole groups; [] while too few wait. None: some were unfit, and dropped."""
        since, wanted = groups.waiting_since(db), self._episodes.groups_per_step
        if since is None:
            return []
        is_late = now or at - since >= self._training.max_wait_s
        steps = groups.whole(db, least=1 if is_late else wanted, most=wanted, most_samples=most)
        return batches.sifted(db, of, steps, size=len(steps), at=at)

    async def _read_granted(self, granted: _Grant) -> Lease:
        try:
            return await self._reader.read(lambda db: _read(db, granted, lease_s=self._training.lease_s))
        except LedgerUnavailable:
            await self.release(granted.lease_id, granted.fence, reason="its samples could not be read")
            raise

    @read
    def leased(self, db: sqlite3.Connection, fence: int) -> Lease:
        """Return a live lease and the samples it still has. Raises CommitRefused when the lease has ended."""
        found = db.execute("SELECT lease_id FROM lease WHERE fence = ?", (fence,)).fetchone()
        lease_id = f"of fence {fence}" if found is None else str(found["lease_id"])
        row = check_live(db, lease_id, fence)
        query = (
            "SELECT turn FROM lease_sample JOIN turn ON turn = id WHERE fence = ? AND outcome = 'leased'"
            " ORDER BY sampled_at, turn"
        )
        turns = tuple(turn for (turn,) in db.execute(query, (fence,)))
        granted = _Grant(lease_id, row["policy"], fence, row["parent"], row["expires_at"], turns)
        return _read(db, granted, lease_s=self._training.lease_s)

    @write
    def renew(self, db: sqlite3.Connection, lease_id: str, fence: int) -> float:
        """Extend a lease and return the new deadline. Raises CommitRefused when the lease has ended."""
        check_live(db, lease_id, fence)
        expires_at = self._clock() + self._training.lease_s
        db.execute("UPDATE lease SET expires_at = ? WHERE lease_id = ?", (expires_at, lease_id))
        return expires_at

    async def begin_step(self, lease_id: str, fence: int) -> float:
        """Renew a lease whose optimizer steps next; a deletion of its samples waits for the commit, at most `STEP_S`.

        Raises CommitRefused when the lease has ended.
        """
        before, self._step = self._step, (fence, time.monotonic() + STEP_S)  # first: no deletion comes between
        try:
            return await self.renew(lease_id, fence)
        except BaseException:
            self._step = before
            raise

    @write
    def release(
        self,
        db: sqlite3.Connection,
        lease_id: str,
        fence: int,
        *,
        reason: str,
        drop: Mapping[str, DropReason] | None = None,
    ) -> None:
        """End a lease: its samples wait again, except those in `drop`. Idempotent.

        Raises CommitRefused when the lease has ended otherwise.
        """
        at = self._clock()
        ended = db.execute("SELECT state FROM lease WHERE lease_id = ? AND fence = ?", (lease_id, fence)).fetchone()
        if ended is not None and ended["state"] == "released":
            return
        check_live(db, lease_id, fence)
        drop_leased(db, fence, drop or {}, at=at)
        end(db, fence, "released", reason=reason, at=at)

    @read
    def live_lease(self, db: sqlite3.Connection) -> str | None:
        """Return the id of the lease that can still be committed."""
        found = db.execute("SELECT lease_id FROM lease WHERE state = 'live'").fetchone()
        return None if found is None else str(found["lease_id"])

    @read
    def overdue(self, db: sqlite3.Connection) -> str | None:
        """Return the name of the trainer whose live lease is past its deadline: the trainer hangs, or is gone."""
        query = "SELECT trainer FROM lease WHERE state = 'live' AND expires_at < ?"
        found = db.execute(query, (self._clock(),)).fetchone()
        return None if found is None else str(found[0])

    @write
    def revoke(self, db: sqlite3.Connection, *, trainer: str | None = None, reason: str) -> bool:
        """End the live lease of a dead trainer (None: of any trainer); its samples wait again. False: there is none."""
        found = db.execute("SELECT fence, trainer FROM lease WHERE state = 'live'").fetchone()
        if found is None or trainer not in (None, found["trainer"]):
            return False
        end(db, found["fence"], "revoked", reason=reason, at=self._clock())
        return True


# For other transactions


def learns(db: sqlite3.Connection, policy: str = SHARED_POLICY) -> bool:
    """Return True unless learning is paused, for everyone or for this policy."""
    return bool(schema.get_int(db, "learning", 1) and schema.get_int(db, schema.of_policy("learning", policy), 1))


def revoke_built_on(db: sqlite3.Connection, parents: Collection[int], *, reason: str, at: float) -> None:
    """End the live lease if its parent is one of these versions."""
    found = db.execute("SELECT fence, parent FROM lease WHERE state = 'live'").fetchone()
    if found is not None and found["parent"] in parents:
        end(db, found["fence"], "revoked", reason=reason, at=at)


def expire(db: sqlite3.Connection, *, at: float) -> None:
    """End the live lease if its deadline has passed."""
    found = db.execute("SELECT fence FROM lease WHERE state = 'live' AND expires_at <= ?", (at,)).fetchone()
    if found is not None:
        end(db, found["fence"], "expired", reason="not renewed in time", at=at)


def bound(db: sqlite3.Connection, *, until: float) -> None:
    """Move the deadline of the live lease to `until` at the latest: the wall clock may have been set back since."""
    db.execute("UPDATE lease SET expires_at = min(expires_at, ?) WHERE state = 'live'", (until,))


def check_live(db: sqlite3.Connection, lease_id: str, fence: int) -> sqlite3.Row:
    """Return the row of a live lease. Raises CommitRefused when it has ended, or the fence is another lease's."""
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


def drop_leased(db: sqlite3.Connection, fence: int, drop: Mapping[str, DropReason], *, at: float) -> None:
    """Drop samples of a lease that the trainer can never use."""
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
    """End a lease; the samples that it still has wait again."""
    for (turn,) in db.execute(
        "SELECT turn FROM lease_sample WHERE fence = ? AND outcome = 'leased'", (fence,)
    ).fetchall():
        move(db, turn, TurnState.SAMPLED, at=at, detail=f"lease {state}")
        feedback.catch_up(db, turn, at=at)
    db.execute("UPDATE lease_sample SET outcome = 'returned' WHERE fence = ? AND outcome = 'leased'", (fence,))
    db.execute("UPDATE lease SET state = ?, reason = ?, ended_at = ? WHERE fence = ?", (state, reason, at, fence))


def _insert(
    db: sqlite3.Connection, waiting: list[Waiting], trainer: str, of: Chain, *, at: float, lease_s: float
) -> _Grant:
    fence = schema.get_int(db, "fence") + 1
    schema.put(db, "fence", fence)
    lease_id = f"lease-{fence}-{secrets.token_hex(4)}"
    db.execute(
        "INSERT INTO lease (lease_id, policy, fence, trainer, parent, state, granted_at, expires_at)"
        " VALUES (?, ?, ?, ?, ?, 'live', ?, ?)",
        (lease_id, of.policy, fence, trainer, of.tip, at, at + lease_s),
    )
    for _, row in waiting:
        move(db, row, TurnState.LEASED, at=at, detail=lease_id)
        db.execute("INSERT INTO lease_sample (fence, turn) VALUES (?, ?)", (fence, row))
    return _Grant(lease_id, of.policy, fence, of.tip, at + lease_s, tuple(row for _, row in waiting))


def _read(db: sqlite3.Connection, granted: _Grant, *, lease_s: float) -> Lease:
    return Lease(
        lease_id=granted.lease_id,
        fence=granted.fence,
        parent=granted.parent,
        expires_at=granted.expires_at,
        lease_s=lease_s,
        samples=tuple(sample for row in granted.rows if (sample := read_sample(db, row)) is not None),
        policy=granted.policy,
    )

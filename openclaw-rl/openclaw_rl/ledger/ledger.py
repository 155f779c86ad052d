"""The ledger: the memory of the system, and its queue.

One SQLite file. Every turn is in exactly one counted state; every change of state is one transaction, checked for
legality and on disk before the call returns. It survives `kill -9` at any point, and `audit()` proves what it promises
from the file alone.

This class is the async face: it puts each call on the writer's thread or on a reader's, and hands over the time. What
the calls do is in `serving`, `judging`, `leases`, `chain`, `versions`, `reports` and `audit`. Nothing here knows HTTP,
engines or torch.
"""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.ledger import (
    audit,
    chain,
    deletion,
    feedback,
    forget,
    judging,
    leases,
    meta,
    open,
    reports,
    retention,
    serving,
    versions,
)
from openclaw_rl.ledger.lock import InstanceLock
from openclaw_rl.ledger.masks import Masks
from openclaw_rl.ledger.reader import Reader
from openclaw_rl.ledger.records import (
    FeedbackOutcome,
    FeedbackTarget,
    Forgotten,
    Identity,
    Retained,
    TurnRecord,
    TurnSummary,
)
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.settings import MemorySettings, RedactionSettings, TrainingSettings
from openclaw_rl.trainers.api import Commit, Tip
from openclaw_rl.types import (
    DropReason,
    Feedback,
    Ids,
    JudgedTurn,
    Lease,
    NextState,
    OpenTurn,
    Request,
    Sample,
    SideCount,
    Turn,
    TurnKey,
    TurnState,
    Verdict,
    Version,
    VersionState,
)

T = TypeVar("T")
Clock = Callable[[], float]

_CHAT_TIMEOUT_S = 10.0
"""A chat waits no longer than this for a disk that hangs; the reply then goes out unrecorded, and says so."""
_CONNECTIONS = 4
"""Of the writer, its syncer, and two readers."""
_PLANS = 5
"""How often a session may go on while it is being forgotten."""
_RETAIN_ROWS = 20_000
"""Let go of in one round; the next one goes on."""


class Ledger:
    """Made by `open`, ended by `aclose`. Every call may raise LedgerError."""

    def __init__(
        self, writer: Writer, reader: Reader, lock: InstanceLock, training: TrainingSettings, masks: Masks, clock: Clock
    ) -> None:
        self._writer, self._reader, self._lock, self._training, self._clock = writer, reader, lock, training, clock
        self._masks = masks
        self._deletes = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        identity: Identity,
        training: TrainingSettings,
        redaction: RedactionSettings = RedactionSettings(),  # noqa: B008 (frozen)
        memory: MemorySettings = MemorySettings(),  # noqa: B008 (frozen)
        clock: Clock = time.time,
        lock: InstanceLock | None = None,
    ) -> Self:
        """lock: this ledger's, held already; it is the ledger's to release from now on.

        Raises LedgerLocked (names the process that has it) and LedgerMismatch (names both models)."""
        if lock is None:
            lock = await asyncio.to_thread(_lock, path)
        try:
            await asyncio.to_thread(open.prepare, path, identity, now=clock())
        except BaseException:
            lock.release()
            raise
        connect = partial(open.connect, path, cache_mb=memory.ledger_mb / _CONNECTIONS)
        writer = Writer(connect)
        writer.start()
        masks = Masks(redaction, remembered=memory.clean_texts)
        return cls(writer, Reader(partial(connect, read_only=True)), lock, training, masks, clock)

    async def aclose(self) -> None:
        """Writes what was handed in, then lets the file go."""
        try:
            await self._writer.close()
            await self._reader.close()
        finally:
            self._lock.release()

    @property
    def is_closed(self) -> bool:
        return self._writer.is_closed

    @property
    def failure(self) -> str | None:
        """Why the file cannot be written now; None when all is well. It recovers by itself."""
        return self._writer.failure

    # Serving

    async def begin(self, request: Request) -> None:
        """Committed before generation starts, without an fsync: the first token waits for it, and a power cut that
        takes it takes the unfinished reply as well. (`kill -9` takes nothing.)"""
        await self._writer.write(
            lambda db: serving.begin(db, self._masks.request(request), prompt_tokens=len(request.prompt_ids)),
            timeout_s=_CHAT_TIMEOUT_S,
            is_synced=False,
        )

    async def finish(self, turn: Turn, key: TurnKey) -> DropReason | None:
        """On disk before the finish chunk is sent: SERVED, or DROPPED with `turn.drop`, or as `redacted`. Returns the
        reason."""
        return await self._chat(lambda db: serving.finish(db, self._masks.turn(turn), key, at=self._clock()))

    async def abandon(self, request_id: str, reason: DropReason, detail: str = "") -> None:
        """No turn came of this request."""
        await self._chat(lambda db: serving.abandon(db, request_id, reason, self._masks.text(detail)))

    async def count_side(self, side: SideCount) -> None:
        await self._chat(lambda db: serving.count_side(db, side))

    # Pairing

    async def open_turns(self, limit: int) -> list[OpenTurn]:
        """Turns that wait for a next state: the newest `limit`, newest last."""
        return await self._reader.read(lambda db: serving.open_turns(db, limit))

    async def pair(
        self, turn_id: str, next_state: NextState, *, by_request_id: str, superseded: Collection[str] = ()
    ) -> None:
        """SERVED → PAIRED, and its `superseded` retries → DROPPED, in one. A turn that was dropped stays so; its next
        state is kept for the record. Without an fsync, as `begin`: a power cut leaves the turns open."""
        await self._writer.write(
            lambda db: serving.pair(
                db, turn_id, self._masks.next_state(next_state), by_request_id, superseded, at=self._clock()
            ),
            timeout_s=_CHAT_TIMEOUT_S,
            is_synced=False,
        )

    async def drop(
        self, turn_id: str, reason: DropReason, detail: str = "", *, seen_feedback: int | None = None
    ) -> None:
        """From any state before LEASED. Not done when the user said more of the turn than the `seen_feedback` pieces
        that the caller knew, nor for want of an answer when the user said something instead."""
        await self._chat(
            lambda db: serving.drop(db, turn_id, reason, detail, at=self._clock(), seen_feedback=seen_feedback)
        )

    async def expire(self, older_than: float) -> list[str]:
        """SERVED turns that finished before → NO_NEXT_STATE; their ids."""
        expired: list[str] = []
        while some := await self._writer.write(lambda db: serving.expire(db, older_than, at=self._clock())):
            expired += some
        return expired

    # Judging and scoring

    async def to_judge(self, limit: int, *, skip: Collection[str] = ()) -> list[JudgedTurn]:
        """PAIRED turns, oldest first, less those somebody works on."""
        return await self._reader.read(lambda db: judging.in_state(db, TurnState.PAIRED, limit, skip))

    async def record_verdict(self, turn_id: str, verdict: Verdict | None) -> None:
        """PAIRED → JUDGED, whatever the verdict; None: the judge was asked, and could not say. Nothing when the user
        rated the turn meanwhile."""
        await self._writer.write(
            lambda db: judging.record_verdict(db, turn_id, self._masks.verdict(verdict), at=self._clock())
        )

    async def to_score(self, limit: int, *, skip: Collection[str] = ()) -> list[JudgedTurn]:
        """JUDGED turns, oldest first, less those somebody works on."""
        return await self._reader.read(lambda db: judging.in_state(db, TurnState.JUDGED, limit, skip))

    async def record_sample(self, sample: Sample, *, seen_feedback: int | None = None) -> None:
        """JUDGED → SAMPLED: it waits for a trainer. Not done when the user said more of the turn than the
        `seen_feedback` pieces it was scored with: it stays JUDGED, to be scored again."""
        await self._writer.write(
            lambda db: judging.record_sample(
                db, self._masks.sample(sample), seen_feedback=seen_feedback, at=self._clock()
            )
        )

    async def shed(self, state: TurnState, keep: int) -> int:
        """End the oldest turns of `state` beyond `keep` as BACKLOG; how many."""
        if (await self.counts()).get(state, 0) <= keep:
            return 0
        total = 0
        while some := await self._writer.write(lambda db: judging.shed(db, state, keep, at=self._clock())):
            total += some
        return total

    # Feedback

    async def feedback_target(
        self, *, user: str, turn_id: str | None = None, session_id: str | None = None
    ) -> FeedbackTarget | None:
        """The turn of that id, or the newest of that session: None when this user has none."""
        return await self._reader.read(
            lambda db: feedback.target(db, user=user, turn_id=turn_id, session_id=session_id)
        )

    async def record_feedback(self, said: Feedback, *, user: str, demonstration: Ids | None = None) -> FeedbackOutcome:
        """What the user says of a turn; it wins over the judge. `demonstration`: the tokens of `said.demonstration` as
        a reply, its end included; without them nothing is trained on it. The same feedback_id again changes nothing.
        Raises FeedbackReused."""

        def record(db: sqlite3.Connection) -> FeedbackOutcome:
            kept = self._masks.feedback(said)
            ids = demonstration if kept.demonstration == said.demonstration else None
            return feedback.record(db, kept, user=user, demonstration=ids, at=self._clock())

        return await self._writer.write(record)

    # Switches

    async def learning(self) -> bool:
        """Whether batches are handed out; kept over restarts."""
        return await self._reader.read(lambda db: bool(meta.get_int(db, "learning", 1)))

    async def set_learning(self, on: bool) -> None:
        await self._writer.write(lambda db: meta.put(db, "learning", int(on)))

    async def forget(self, session_id: str, user: str | None = None) -> Forgotten:
        """Delete a session and all that it alone refers to. Raises LedgerError when there is none, when several users
        have one of that name and none is named, or while it is being answered."""
        whose = await self._reader.read(lambda db: forget.owner(db, session_id, user))
        async with self._deleting():
            for _ in range(_PLANS):
                plan = await self._reader.read(lambda db: forget.plan(db, whose, session_id))
                done = await self._writer.write(lambda db, plan=plan: forget.carry_out(db, plan, at=self._clock()))  # type: ignore[misc]
                if done is not None:
                    break
            else:
                raise LedgerError(f"session {session_id!r} goes on all the time: try again")
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

    # Training

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
                lambda db: leases.grant(db, self._training, trainer=trainer, n=n, now=now, at=self._clock())
            )
            if granted is None:
                return None
            if isinstance(granted, leases.Grant):
                return await self._read_lease(granted)

    async def _read_lease(self, grant: leases.Grant) -> Lease:
        try:
            return await self._reader.read(lambda db: leases.read(db, grant, lease_s=self._training.lease_s))
        except LedgerUnavailable:
            await self.release(grant.lease_id, grant.fence, reason="its samples could not be read")
            raise

    async def leased(self, fence: int) -> Lease:
        """A live lease once more. Raises CommitRefused when it is over."""
        lease_s = self._training.lease_s
        return await self._reader.read(lambda db: leases.read(db, leases.held(db, fence), lease_s=lease_s))

    async def renew(self, lease_id: str, fence: int) -> float:
        """The new deadline. Raises CommitRefused when the lease is over."""
        lease_s = self._training.lease_s
        return await self._writer.write(lambda db: leases.renew(db, lease_id, fence, at=self._clock(), lease_s=lease_s))

    async def release(
        self, lease_id: str, fence: int, *, reason: str, drop: Mapping[str, DropReason] | None = None
    ) -> None:
        """The samples wait again, but for those in `drop`. Raises CommitRefused when the lease is over otherwise."""
        dropped = drop or {}
        await self._writer.write(
            lambda db: leases.release(db, lease_id, fence, reason=reason, drop=dropped, at=self._clock())
        )

    async def live_lease(self) -> str | None:
        """The id of the lease that may yet be committed."""
        return await self._reader.read(leases.live_id)

    async def overdue(self) -> str | None:
        """The name of the trainer that has let its lease run out without a word: it hangs, or is gone."""
        return await self._reader.read(lambda db: leases.overdue(db, at=self._clock()))

    async def revoke(self, *, trainer: str | None = None, reason: str) -> bool:
        """End the live lease of a trainer known to be dead (None: whosever it is); its samples wait again. False when
        there is none."""
        return await self._writer.write(
            lambda db: leases.revoke(db, trainer=trainer, parents=None, reason=reason, at=self._clock())
        )

    async def commit(self, commit: Commit) -> int:
        """One transaction: the fence is the newest, the parent is the tip; the samples are TRAINED in a new version, a
        candidate. The same lease_id again gives the same version. Raises CommitRefused."""
        return await self._writer.write(lambda db: chain.commit(db, commit, at=self._clock()))

    async def durable(self, weight_version: int) -> None:
        """The trainer can go on from it after a crash."""
        await self._writer.write(lambda db: chain.durable(db, weight_version))

    async def lose_undurable(self, reason: str) -> Version | None:
        """The trainer crashed: versions behind the last durable one are LOST, their samples wait again, and the durable
        weights go on (and serve) under a new number. None when nothing was lost."""

        def lose(db: sqlite3.Connection) -> Version | None:
            number = chain.lose_undurable(db, reason, at=self._clock())
            return None if number is None else versions.read(db, number)

        return await self._writer.write(lose)

    async def optimizer_pruned(self, weight_version: int) -> None:
        """Its optimizer state was deleted: `tip` says so when it is rolled back to."""
        await self._writer.write(lambda db: versions.optimizer_pruned(db, weight_version))

    async def needed_versions(self, newest: int) -> frozenset[int]:
        """Those whose files must stay; the `newest` that passed the gate are among them."""
        return await self._reader.read(lambda db: versions.needed(db, newest))

    async def prune_weights(self, n: int, newest: int) -> str | None:
        """Forget where the weights of `n` are: it is never served again. The folder, when no other version names it.
        Raises LedgerError when it is one of `needed_versions(newest)`."""
        return await self._writer.write(lambda db: versions.prune_weights(db, n, newest))

    # Versions

    async def versions(self, *, since: int = 0, newest: int | None = None) -> list[Version]:
        """By number, their reports without the probes: all `since` one, or the `newest` of them. All of a ledger that
        has been at it for long are very many."""
        return await self._reader.read(lambda db: versions.read_all(db, since=since, newest=newest))

    async def unfinished_versions(self) -> list[Version]:
        """CANDIDATE, GATED or LOADING: on the way to be served, or to be passed over. By number."""
        return await self._reader.read(versions.unfinished)

    async def version_folders(self) -> dict[int, str]:
        """Of the versions that still have their weights, by number."""
        return await self._reader.read(versions.folders)

    async def version(self, n: int) -> Version:
        """One, with its whole report."""
        return await self._reader.read(lambda db: versions.read(db, n))

    async def set_version_state(self, n: int, state: VersionState, reason: str | None = None) -> None:
        """Legal changes only; the state it has already is no change. SERVING retires the one that served."""
        await self._writer.write(lambda db: versions.set_state(db, n, state, reason))

    async def reject(self, n: int, reason: str) -> list[int]:
        """The gate's no: n and all built on it are REJECTED, the tip is its parent. The batch of n ends
        `gate_rejected`, those of later versions wait again. Returns the rejected versions, newest first."""
        return await self._writer.write(lambda db: chain.reject(db, n, reason, at=self._clock()))

    async def rejections_in_a_row(self) -> int:
        """Since a version last passed the gate."""
        return await self._reader.read(lambda db: meta.get_int(db, "rejections_in_a_row"))

    async def rollback(self, to: int, *, requeue: bool) -> Version:
        """Versions after `to` are ROLLED_BACK; their samples are dropped, or wait again with `requeue`. `to` is
        SERVING."""

        def roll_back(db: sqlite3.Connection) -> Version:
            chain.rollback(db, to, requeue=requeue, at=self._clock())
            return versions.read(db, to)

        return await self._writer.write(roll_back)

    async def roll_back_behind(self, good: int) -> int:
        """To the newest version up to `good` that can be gone back to, which serves from here on. The samples of what
        was abandoned are dropped."""
        return await self._writer.write(lambda db: chain.rollback_behind(db, good, at=self._clock()))

    async def pinned(self) -> int | None:
        """The version that is to be served whatever the tip is."""
        return await self._reader.read(versions.pinned)

    async def check_pinnable(self, n: int) -> None:
        """Raises LedgerError when `set_pin` would: before anything is loaded for it."""
        await self._reader.read(lambda db: versions.check_pinnable(db, n))

    async def set_pin(self, n: int | None) -> None:
        """For the publisher alone: training goes on from the tip."""
        await self._writer.write(lambda db: versions.set_pin(db, n))

    async def serving_version(self) -> int:
        """What new requests are to get."""
        return await self._reader.read(versions.serving)

    # For people and gates

    async def turn(self, turn_id: str) -> TurnRecord | None:
        return await self._reader.read(lambda db: reports.turn(db, turn_id))

    async def turns(
        self,
        *,
        limit: int = 50,
        state: TurnState | None = None,
        session_id: str | None = None,
        user: str | None = None,
    ) -> list[TurnSummary]:
        """Newest first."""
        return await self._reader.read(
            lambda db: reports.turns(db, limit=limit, state=state, session_id=session_id, user=user)
        )

    async def counts(self) -> dict[str, int]:
        """By state, `dropped.<reason>`, `abandoned.<reason>`, `side.<kind>`; `sampled` is what waits for a trainer."""
        return await self._reader.read(reports.counts)

    async def recent_replies(self, *, sampled_by: int | None, limit: int) -> list[tuple[Ids, Ids]]:
        """(prompt, response) of the newest replies of one version, for gates."""
        return await self._reader.read(lambda db: reports.recent_replies(db, sampled_by=sampled_by, limit=limit))

    async def user_verdicts(self, *, limit: int) -> list[tuple[int, int]]:
        """(version, verdict) of the newest turns that a user answered, oldest first, of versions that are alive."""
        return await self._reader.read(lambda db: reports.user_verdicts(db, limit))

    async def recent_prompts(self, limit: int) -> list[Ids]:
        """The newest prompts of the sessions that were active last, for prewarming."""
        return await self._reader.read(lambda db: reports.recent_prompts(db, limit))

    async def audit(self, *, is_deep: bool = False) -> list[str]:
        """Violations of what the ledger promises, found from the file alone; [] is good."""
        return await self._reader.read(lambda db: audit.audit(db, is_deep=is_deep))

    async def _chat(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._writer.write(work, timeout_s=_CHAT_TIMEOUT_S)


def _lock(path: Path) -> InstanceLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise LedgerError(f"cannot make the folder {path.parent}: {error.strerror}") from error
    return InstanceLock.beside(path)


def _cut(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]

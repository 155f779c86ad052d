"""Turns that wait for the judge or the method, and the verdicts and samples that these return."""

import sqlite3
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import batches, blobs, feedback, leases, wishes
from openclaw_rl.ledger.blobs import pack_floats, pack_ids, pack_mask, pack_runs
from openclaw_rl.ledger.records import read_context, read_judged
from openclaw_rl.ledger.states import find_turn, move
from openclaw_rl.ledger.store import LedgerPart, read, write
from openclaw_rl.types import DropReason, JudgedTurn, Sample, TurnState, Verdict

_DROPPED_AT_ONCE = 1000
"""Turns that are dropped in one transaction; chats wait until it ends."""


class Judging(LedgerPart):
    """A turn from its next state to a sample that waits for a trainer."""

    @read
    def to_judge(self, db: sqlite3.Connection, limit: int, *, skip: Collection[str] = ()) -> list[JudgedTurn]:
        """Return PAIRED turns, oldest first, without those in `skip`, which a worker has already."""
        turns = _oldest(db, TurnState.PAIRED, limit, skip)
        return [replace(turn, episode=read_context(db, turn.request)) for turn in turns]

    @write
    def record_verdict(self, db: sqlite3.Connection, turn_id: str, verdict: Verdict | None) -> None:
        """Move a turn PAIRED → JUDGED, for any verdict; None: the judge could not decide.

        The call changes nothing if the user has rated the turn meanwhile: the user wins over the judge.
        """
        verdict = self._redactor.verdict(verdict)
        row = find_turn(db, turn_id)
        if feedback.is_rated(db, row):
            return
        (state,) = db.execute("SELECT state FROM turn WHERE id = ?", (row,)).fetchone()
        if state != TurnState.PAIRED:
            raise LedgerError(f"turn {turn_id} is {state} and cannot become judged")
        # A verdict of 0, or none at all, is no end: the method decides, and may still find a hint.
        detail = "no verdict" if verdict is None else f"{verdict.value:+d}"
        move(db, row, TurnState.JUDGED, at=self._clock(), detail=detail)
        if verdict is not None:
            feedback.put_verdict(db, row, verdict)

    @read
    def to_score(self, db: sqlite3.Connection, limit: int, *, skip: Collection[str] = ()) -> list[JudgedTurn]:
        """Return JUDGED turns, oldest first, without those in `skip`, which a worker has already.

        Steps of episodes are not among them: they wait for the credit of their group.
        """
        return _oldest(db, TurnState.JUDGED, limit, skip)

    @write
    def record_sample(
        self, db: sqlite3.Connection, sample: Sample, *, seen_feedback: Collection[str] | None = None
    ) -> None:
        """Move a turn JUDGED → SAMPLED: it waits for a trainer.

        The call changes nothing if the turn's feedback is not that of the ids `seen_feedback`, which the method knew.
        The turn stays JUDGED, and the method scores it again. A hint in the user's words becomes a wish.
        """
        at, sample = self._clock(), self._redactor.sample(sample)
        row = find_turn(db, sample.sample_id)
        if feedback.has_news(db, row, seen_feedback):
            return
        move(db, row, TurnState.SAMPLED, at=at)
        insert_sample(db, row, sample)
        db.execute(
            "UPDATE turn SET is_tool = ?, sampled_at = ?, oldest_version = ? WHERE id = ?",
            (sample.is_tool_turn, at, sample.oldest_version, row),
        )
        wishes.note(db, row, sample, at=at)

    _dropped: Mapping[TurnState, int] = {}
    """Turns that writes dropped beyond the ledger's limits, so far; `drop_oldest` reports them."""
    _reported: Mapping[TurnState, int] = {}

    async def drop_oldest(self, state: TurnState, keep: int) -> int:
        """Drop the oldest turns of `state` beyond `keep` as BACKLOG.

        Return their number, with those that the ledger's own limit has dropped since the last call.
        """
        so_far = self._dropped.get(state, 0)
        total = so_far - self._reported.get(state, 0)
        self._reported = {**self._reported, state: so_far}
        # Counted by a reader first: a write would cost an fsync at each call, and mostly there is no backlog.
        while await self._waiting(state) > keep and (some := await self._drop_some(state, keep)):
            total += some
        return total

    @read
    def _waiting(self, db: sqlite3.Connection, state: TurnState) -> int:
        return _count(db, state)

    @write
    def _drop_some(self, db: sqlite3.Connection, state: TurnState, keep: int) -> int:
        return self._drop_beyond(db, state, keep)

    def _hold_limits(self, db: sqlite3.Connection) -> None:
        for state, most in self._most_waiting.items():
            if dropped := self._drop_beyond(db, state, most):
                self._dropped = {**self._dropped, state: self._dropped.get(state, 0) + dropped}

    def _drop_beyond(self, db: sqlite3.Connection, state: TurnState, keep: int) -> int:
        waiting = _count(db, state)
        if waiting > keep:  # `episodes.max_groups_ahead` bounds the steps of episodes
            query = "SELECT count(*) FROM turn WHERE state = ? AND of_episode IS NOT NULL"
            waiting -= db.execute(query, (str(state),)).fetchone()[0]
        most = min(waiting - keep, _DROPPED_AT_ONCE)
        if most <= 0:
            return 0
        at = self._clock()
        if state is TurnState.SAMPLED:
            rows = _to_drop(db, most)
        else:
            query = "SELECT id FROM turn WHERE state = ? AND of_episode IS NULL ORDER BY id LIMIT ?"
            rows = [row for (row,) in db.execute(query, (str(state), most)).fetchall()]
        for row in rows:
            move(db, row, TurnState.DROPPED, at=at, reason=DropReason.BACKLOG, detail=f"{waiting} were {state}")
        return len(rows)


def _oldest(db: sqlite3.Connection, state: TurnState, limit: int, skip: Collection[str]) -> list[JudgedTurn]:
    # By the index of turns outside of episodes for the one, of all turns by state for the other.
    where = "state = 'judged' AND of_episode IS NULL" if state is TurnState.JUDGED else f"state = '{state}'"
    rows = db.execute(f"SELECT id, turn_id FROM turn WHERE {where} ORDER BY id LIMIT ?", (limit + len(skip),))
    wanted = [row for row, turn_id in rows if turn_id not in skip][:limit]
    return [read_judged(db, row) for row in wanted]


def _to_drop(db: sqlite3.Connection, most: int) -> list[int]:
    """Return samples to drop, the oldest of the policy with most of them; of policies that are paused first."""
    left = {policy: n for policy, (_, n) in batches.waiting(db).items()}
    is_learning = {policy: leases.learns(db, policy) for policy in left}
    oldest: dict[str, Iterator[tuple[float, int]]] = {}
    rows: list[int] = []
    while left and len(rows) < most:
        policy = min(left, key=lambda one: (is_learning[one], -left[one]))
        if policy not in oldest:
            lines = [batches.oldest(db, is_tool=is_tool, limit=most, policy=policy) for is_tool in (False, True)]
            oldest[policy] = iter(sorted(one for line in lines for one in line))
        found = next(oldest[policy], None)
        if found is None:
            del left[policy]
        else:
            left[policy] -= 1
            rows.append(found[1])
    return rows


def _count(db: sqlite3.Connection, state: TurnState) -> int:
    (n,) = db.execute("SELECT coalesce(sum(n), 0) FROM counter WHERE name = ?", (str(state),)).fetchone()
    return int(n)


def insert_sample(db: sqlite3.Connection, row: int, sample: Sample) -> None:
    """Insert a sample; a column that equals the turn's stays NULL."""
    turn = db.execute(
        "SELECT prompt, ids, log_probs, mask, versions FROM request JOIN reply USING (id) WHERE id = ?", (row,)
    ).fetchone()
    mask = pack_mask(sample.loss_mask)
    own = {
        # Compared as they are stored: equal bytes are equal contents.
        "prompt": blobs.put_prompt(db, sample.prompt_ids),
        "ids": pack_ids(sample.response_ids),
        "log_probs": pack_floats(sample.rollout_log_probs),
        "mask": b"" if mask is None and turn["mask"] is not None else mask,  # b"": all True, though the turn's is not
        "versions": pack_runs(sample.versions),
    }
    teacher, student = sample.teacher_log_probs, sample.student_log_probs
    db.execute(
        "INSERT INTO sample (id, temperature, reward, scored_version, extra, is_demonstration, teacher_log_probs,"
        " student_log_probs, prompt, ids, log_probs, mask, versions) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            row,
            sample.temperature,
            sample.reward,
            sample.scored_version,
            None if sample.hint is None else sample.hint.to_json(),
            sample.is_demonstration,
            None if teacher is None else pack_floats(teacher),
            None if student is None else pack_floats(student),
            *(None if blob == turn[column] else blob for column, blob in own.items()),
        ),
    )

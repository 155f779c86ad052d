"""What the chat's path writes: requests, replies, their pairing with what came next.

`begin` is committed before the client sees a token, `finish` on disk before it sees the end of the reply.

A turn's way through the ledger: begun, finished, paired, judged, scored, rated.
"""

import sqlite3
from collections.abc import Collection
from dataclasses import replace

import orjson

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import blobs, feedback, judging, reports
from openclaw_rl.ledger.blobs import pack_floats, pack_ids, pack_mask, pack_runs
from openclaw_rl.ledger.records import FeedbackOutcome, FeedbackTarget
from openclaw_rl.ledger.states import append_event, find_turn, move
from openclaw_rl.ledger.store import CHAT_TIMEOUT_S, LedgerPart
from openclaw_rl.types import (
    DropReason,
    Feedback,
    Ids,
    JudgedTurn,
    NextState,
    OpenTurn,
    Request,
    Sample,
    Scope,
    SideCount,
    Turn,
    TurnKey,
    TurnState,
    Verdict,
)

_UNANSWERED = (DropReason.NO_NEXT_STATE, DropReason.SUPERSEDED, DropReason.BRANCH)


def begin(db: sqlite3.Connection, request: Request, *, prompt_tokens: int | None = None) -> None:
    """prompt_tokens: of a prompt whose ids are not kept."""
    db.execute(
        "INSERT INTO request (request_id, policy, user, session_id, received_at, episode, task, step, sampling, tools,"
        " template_kwargs, prompt_tokens, prompt, messages) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            request.request_id,
            request.scope.policy,
            request.scope.user,
            request.scope.session_id,
            request.received_at,
            request.episode,
            request.task,
            request.step,
            blobs.put_text(db, orjson.dumps(request.sampling).decode()),
            blobs.put_text(db, request.tools_json),
            blobs.put_text(db, request.template_kwargs_json),
            len(request.prompt_ids) if prompt_tokens is None else prompt_tokens,
            blobs.put_prompt(db, request.prompt_ids),
            pack_ids(blobs.put_messages(db, request.messages)),
        ),
    )


def finish(db: sqlite3.Connection, turn: Turn, key: TurnKey, *, at: float) -> DropReason | None:
    """Why it ended as it was written; None: it waits for its next state."""
    row = _end_request(db, turn.request_id, "served", None, "")
    if db.execute("SELECT 1 FROM request WHERE id = ? AND prompt_tokens > 0 AND prompt = x''", (row,)).fetchone():
        turn = replace(turn, drop=DropReason.REDACTED)
    state = TurnState.SERVED if turn.drop is None else TurnState.DROPPED
    db.execute(
        "INSERT INTO turn (id, turn_id, state, reason, oldest_version, response_tokens) VALUES (?, ?, ?, ?, ?, ?)",
        (
            row,
            turn.turn_id,
            str(state),
            None if turn.drop is None else str(turn.drop),
            turn.oldest_version,
            len(turn.response_ids),
        ),
    )
    db.execute(
        "INSERT INTO reply VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            row,
            turn.finished_at,
            turn.finish_reason,
            turn.cached_tokens,
            blobs.put_messages(db, [turn.reply])[0],
            pack_ids(turn.response_ids),
            pack_floats(turn.rollout_log_probs),
            pack_mask(turn.loss_mask),
            pack_runs(turn.versions),
        ),
    )
    if turn.drop is None:
        db.execute(
            "INSERT INTO open_turn VALUES (?, ?, ?, ?, ?)",
            (row, turn.finished_at, key.reply_hash, key.before_hash, key.history_hash),
        )
    append_event(db, row, TurnState.SERVED, at=at)
    if turn.drop is not None:
        append_event(db, row, TurnState.DROPPED, at=at, detail=turn.drop)
    return turn.drop


def abandon(db: sqlite3.Connection, request_id: str, reason: DropReason, detail: str) -> None:
    _end_request(db, request_id, "abandoned", reason, detail)


def abandon_interrupted(db: sqlite3.Connection) -> int:
    """At start: nobody will ever finish what the last process was generating. Returns how many."""
    return db.execute(
        "UPDATE request SET outcome = 'abandoned', reason = ?, detail = 'the server stopped' WHERE outcome = 'running'",
        (str(DropReason.INTERRUPTED),),
    ).rowcount


def count_side(db: sqlite3.Connection, side: SideCount) -> None:
    db.execute(
        "INSERT INTO side (at, user, session_id, kind, prompt_tokens, completion_tokens, status)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (side.at, side.user, side.session_id, side.kind, side.prompt_tokens, side.completion_tokens, side.status),
    )


def open_turns(db: sqlite3.Connection, limit: int) -> list[OpenTurn]:
    """The newest `limit` of them, newest last."""
    rows = db.execute(
        "SELECT turn_id, user, session_id, policy, reply_hash, before_hash, history_hash, finished_at"
        " FROM (SELECT * FROM open_turn ORDER BY id DESC LIMIT ?)"
        " JOIN turn USING (id) JOIN request USING (id) ORDER BY id",
        (limit,),
    )
    return [
        OpenTurn(turn_id, Scope(user, session_id, policy), TurnKey(reply, before, history), finished_at)
        for turn_id, user, session_id, policy, reply, before, history, finished_at in rows
    ]


def pair(
    db: sqlite3.Connection,
    turn_id: str,
    next_state: NextState,
    by_request_id: str,
    superseded: Collection[str] = (),
    *,
    at: float,
) -> None:
    """A turn dropped before stays dropped, and one that its user rated goes its way; the next state is kept all the
    same. The retries that this continuation passed over, if they are open yet, end with it or not at all."""
    row = find_turn(db, turn_id)
    (state,) = db.execute("SELECT state FROM turn WHERE id = ?", (row,)).fetchone()
    if db.execute("SELECT 1 FROM next_state WHERE id = ?", (row,)).fetchone():
        raise LedgerError(f"turn {turn_id} is paired already")
    if state == TurnState.SERVED:
        move(db, row, TurnState.PAIRED, at=at)
        db.execute("UPDATE turn SET is_tool = ? WHERE id = ?", (next_state.is_tool, row))
    reactions = orjson.dumps(next_state.reactions).decode() if next_state.reactions else None
    messages = pack_ids(blobs.put_messages(db, next_state.messages))
    db.execute("INSERT INTO next_state VALUES (?, ?, ?, ?)", (row, by_request_id, messages, reactions))
    for other in superseded:
        if db.execute("SELECT 1 FROM turn WHERE turn_id = ? AND state = 'served'", (other,)).fetchone():
            drop(db, other, DropReason.SUPERSEDED, f"continued: {turn_id}", at=at)


def drop(
    db: sqlite3.Connection,
    turn_id: str,
    reason: DropReason,
    detail: str,
    *,
    at: float,
    seen_feedback: int | None = None,
) -> None:
    """What ends a turn for want of an answer ends none that its user said something of."""
    row = find_turn(db, turn_id)
    if feedback.has_news(db, row, seen_feedback):
        return
    (state,) = db.execute("SELECT state FROM turn WHERE id = ?", (row,)).fetchone()
    if reason in _UNANSWERED and _is_spoken_of(db, row, TurnState(state), at=at):
        return
    if state in (TurnState.LEASED, TurnState.TRAINED):  # these end through their lease or their version alone
        raise LedgerError(f"turn {turn_id} is {state} and cannot be dropped ({reason})")
    move(db, row, TurnState.DROPPED, at=at, reason=reason, detail=detail)


def expire(db: sqlite3.Connection, older_than: float, *, at: float, limit: int = 1000) -> list[str]:
    """At most `limit` in one transaction: chats wait behind it."""
    rows = db.execute(
        "SELECT id, turn_id FROM open_turn JOIN turn USING (id) WHERE finished_at < ? ORDER BY finished_at LIMIT ?",
        (older_than, limit),
    ).fetchall()
    for row, _ in rows:
        if not _is_spoken_of(db, row, TurnState.SERVED, at=at):
            move(db, row, TurnState.DROPPED, at=at, reason=DropReason.NO_NEXT_STATE)
    return [turn_id for _, turn_id in rows]


def _is_spoken_of(db: sqlite3.Connection, row: int, state: TurnState, *, at: float) -> bool:
    """True when the user rated or commented the turn. If it still waited for an answer, it is judged by that now."""
    if not (feedback.is_rated(db, row) or feedback.has_comment(db, row)):
        return False
    if state is TurnState.SERVED:
        move(db, row, TurnState.JUDGED, at=at, detail="no next state, but feedback")
    return True


def _end_request(db: sqlite3.Connection, request_id: str, outcome: str, reason: DropReason | None, detail: str) -> int:
    found = db.execute("SELECT id, outcome FROM request WHERE request_id = ?", (request_id,)).fetchone()
    if found is None:
        raise LedgerError(f"no request {request_id}: it was never begun, or could not be written")
    row, before = found
    if before != "running":
        raise LedgerError(f"request {request_id} is {before} already")
    db.execute(
        "UPDATE request SET outcome = ?, reason = ?, detail = ? WHERE id = ?",
        (outcome, None if reason is None else str(reason), detail or None, row),
    )
    return int(row)


class Turns(LedgerPart):
    """From a request to a sample."""

    # Serving

    async def begin(self, request: Request) -> None:
        """Committed, without an fsync: the first token waits for it, and a power cut that takes it takes the unfinished
        reply as well. (`kill -9` takes nothing.)"""
        await self._writer.write(
            lambda db: begin(db, self._masks.request(request), prompt_tokens=len(request.prompt_ids)),
            timeout_s=CHAT_TIMEOUT_S,
            is_synced=False,
        )

    async def finish(self, turn: Turn, key: TurnKey) -> DropReason | None:
        """On disk before the finish chunk is sent: SERVED, or DROPPED with `turn.drop`, or as `redacted`. Returns the
        reason."""
        return await self._chat(lambda db: finish(db, self._masks.turn(turn), key, at=self._clock()))

    async def abandon(self, request_id: str, reason: DropReason, detail: str = "") -> None:
        """No turn came of this request."""
        await self._chat(lambda db: abandon(db, request_id, reason, self._masks.text(detail)))

    async def count_side(self, side: SideCount) -> None:
        await self._chat(lambda db: count_side(db, side))

    # Pairing

    async def open_turns(self, limit: int) -> list[OpenTurn]:
        """Turns that wait for a next state: the newest `limit`, newest last."""
        return await self._reader.read(lambda db: open_turns(db, limit))

    async def pair(
        self, turn_id: str, next_state: NextState, *, by_request_id: str, superseded: Collection[str] = ()
    ) -> None:
        """SERVED → PAIRED, and its `superseded` retries → DROPPED, in one. A turn that was dropped stays so; its next
        state is kept for the record. Without an fsync, as `begin`: a power cut leaves the turns open."""
        await self._writer.write(
            lambda db: pair(
                db, turn_id, self._masks.next_state(next_state), by_request_id, superseded, at=self._clock()
            ),
            timeout_s=CHAT_TIMEOUT_S,
            is_synced=False,
        )

    async def drop(
        self, turn_id: str, reason: DropReason, detail: str = "", *, seen_feedback: int | None = None
    ) -> None:
        """From any state before LEASED. Not done when the user said more of the turn than the `seen_feedback` pieces
        that the caller knew, nor for want of an answer when the user said something instead."""
        await self._chat(lambda db: drop(db, turn_id, reason, detail, at=self._clock(), seen_feedback=seen_feedback))

    async def expire(self, older_than: float) -> list[str]:
        """SERVED turns that finished before → NO_NEXT_STATE; their ids."""
        expired: list[str] = []
        while some := await self._writer.write(lambda db: expire(db, older_than, at=self._clock())):
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

    async def drop_oldest(self, state: TurnState, keep: int) -> int:
        """End the oldest turns of `state` beyond `keep` as BACKLOG; how many."""
        if (await self._reader.read(reports.counts)).get(state, 0) <= keep:
            return 0
        total = 0
        while some := await self._writer.write(lambda db: judging.drop_oldest(db, state, keep, at=self._clock())):
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

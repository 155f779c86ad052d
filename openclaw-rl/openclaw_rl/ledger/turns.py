"""Requests and replies as the chat writes them, and the pairing of a turn with its next state.

`begin` commits the request before the client sees a token; pictures and row have one deadline. `finish` has the turn on
disk before the client sees the end of the reply.
"""

import asyncio
import sqlite3
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import orjson

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import blobs, feedback, pictures, steps
from openclaw_rl.ledger.blobs import pack_floats, pack_ids, pack_mask, pack_runs, unpack_ids
from openclaw_rl.ledger.schema import cut, in_list
from openclaw_rl.ledger.states import append_event, find_turn, move
from openclaw_rl.ledger.store import CHAT_TIMEOUT_S, LedgerPart, chat_write, read, write
from openclaw_rl.types import (
    DropReason,
    EndedTurn,
    NextState,
    OpenTurn,
    Place,
    Request,
    Scope,
    SideCount,
    Turn,
    TurnKey,
    TurnState,
)

_UNANSWERED = (DropReason.NO_NEXT_STATE, DropReason.SUPERSEDED, DropReason.BRANCH)
_EXPIRED_AT_ONCE = 1000
"""Turns that expire in one transaction; chats wait until it ends."""


class Turns(LedgerPart):
    """A turn from its request to its next state, or to its drop."""

    async def begin(self, request: Request) -> None:
        """Commit the request row, without an fsync. `kill -9` does not lose it. Its pictures are on disk before.

        Raises EpisodeRefused when its episode is over.
        """
        if not request.pictures or self._staged is None or self._redactor.hides_pictures:
            await self._begin(request, within_s=CHAT_TIMEOUT_S)
            return
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + CHAT_TIMEOUT_S  # of the files and the row together
        async with self._staged.hold(request.pictures, self._known_pictures, timeout_s=CHAT_TIMEOUT_S):
            await self._begin(request, within_s=give_up_at - clock())

    @read
    def _known_pictures(self, db: sqlite3.Connection, digests: Collection[str]) -> set[str]:
        return pictures.known(db, digests)

    async def _begin(self, request: Request, *, within_s: float) -> None:
        # The first token waits for this commit. It needs no fsync: a power cut that loses the row also loses the reply.
        await self._written(partial(self._insert, request), timeout_s=within_s, is_synced=False)

    def _insert(self, request: Request, db: sqlite3.Connection) -> None:
        if request.in_episode is not None:
            request = steps.begun(db, request)
        prompt_tokens = len(request.prompt_ids)
        # Without the ids, if the prompt has a secret.
        insert_request(db, self._redactor.request(request), prompt_tokens=prompt_tokens, outcome="running")

    @chat_write(is_synced=True)
    def finish(self, db: sqlite3.Connection, turn: Turn, key: TurnKey) -> DropReason | None:
        """Write the turn to disk: SERVED, or DROPPED for `turn.drop` or as `redacted`. Return the reason of the drop;
        None: the turn waits for its next state."""
        turn = self._redactor.turn(turn)
        row = _end_request(db, turn.request_id, "served", None, "")
        if db.execute("SELECT 1 FROM request WHERE id = ? AND prompt_tokens > 0 AND prompt = x''", (row,)).fetchone():
            turn = replace(turn, drop=DropReason.REDACTED)
        (episode,) = db.execute("SELECT in_episode FROM request WHERE id = ?", (row,)).fetchone()
        if episode is not None and turn.drop is None:
            turn = replace(turn, drop=steps.why_untrained(db, episode))
        state = TurnState.SERVED if turn.drop is None else TurnState.DROPPED
        reason = None if turn.drop is None else str(turn.drop)
        db.execute(
            # What answers a step is an environment's, whatever its role: no user's verdict is among those of steps.
            "INSERT INTO turn (id, turn_id, state, reason, oldest_version, response_tokens, of_episode, is_tool,"
            " policy)"
            " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7 IS NOT NULL, (SELECT policy FROM request WHERE id = ?1))",
            (row, turn.turn_id, str(state), reason, turn.oldest_version, len(turn.response_ids), episode),
        )
        insert_reply(db, row, turn)
        if state is TurnState.SERVED:
            feedback.insert_open(db, row, key, turn.finished_at)
        at = self._clock()
        append_event(db, row, TurnState.SERVED, at=at)
        if turn.drop is not None:
            append_event(db, row, TurnState.DROPPED, at=at, detail=turn.drop)
        return turn.drop

    @chat_write(is_synced=True)
    def abandon(self, db: sqlite3.Connection, request_id: str, reason: DropReason, detail: str = "") -> None:
        """End a request that produced no turn."""
        _end_request(db, request_id, "abandoned", reason, self._redactor.text(detail))

    @chat_write(is_synced=True)
    def count_side(self, db: sqlite3.Connection, side: SideCount) -> None:
        """Count a background request of a client: its kind, its tokens, its status, no content."""
        db.execute(
            "INSERT INTO side (at, user, session_id, kind, prompt_tokens, completion_tokens, status)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (side.at, side.user, side.session_id, side.kind, side.prompt_tokens, side.completion_tokens, side.status),
        )

    # Pairing

    @read
    def open_turns(self, db: sqlite3.Connection, limit: int) -> list[OpenTurn]:
        """Return the newest `limit` turns that wait for a next state, newest last."""
        rows = db.execute(
            "SELECT turn_id, user, session_id, request.policy, reply_hash, before_hash, history_hash, place,"
            " finished_at"
            " FROM (SELECT * FROM open_turn ORDER BY id DESC LIMIT ?)"
            " JOIN turn USING (id) JOIN request USING (id) WHERE of_episode IS NULL ORDER BY id",
            (limit,),
        )
        return [
            OpenTurn(
                turn_id,
                Scope(user, session_id, policy),
                TurnKey(reply, before, history, Place(**orjson.loads(place))),
                finished_at,
            )
            for turn_id, user, session_id, policy, reply, before, history, place, finished_at in rows
        ]

    @read
    def ended_turns(self, db: sqlite3.Connection, limit: int) -> list[EndedTurn]:
        """Return users' turns among the newest `limit` that wait for no next state any more, newest last."""
        rows = db.execute(
            "SELECT turn_id, user, session_id, request.policy AS policy, messages, message, finished_at"
            " FROM (SELECT * FROM turn WHERE of_episode IS NULL ORDER BY id DESC LIMIT ?) AS turn"
            " JOIN request USING (id) JOIN reply USING (id)"
            " WHERE turn.state != 'served' AND practice IS NULL AND demonstration_of IS NULL ORDER BY turn.id",
            (limit,),
        ).fetchall()
        return [
            EndedTurn(
                row["turn_id"],
                Scope(row["user"], row["session_id"], row["policy"]),
                blobs.get_messages(db, unpack_ids(row["messages"])),
                blobs.get_messages(db, [row["message"]])[0],
                row["finished_at"],
            )
            for row in rows
        ]

    @read
    def deleted(self, db: sqlite3.Connection, turn_ids: Collection[str]) -> list[str]:
        """Return those of the turns that are not here: they were deleted."""
        here: set[str] = set()
        for some in cut(list(turn_ids)):
            marks, values = in_list(some)
            here.update(
                found for (found,) in db.execute(f"SELECT turn_id FROM turn WHERE turn_id IN ({marks})", values)
            )
        return [turn_id for turn_id in turn_ids if turn_id not in here]

    # Without an fsync, as `begin`: after a power cut the turns are open again.
    @chat_write(is_synced=False)
    def pair(
        self,
        db: sqlite3.Connection,
        turn_id: str,
        next_state: NextState,
        *,
        by_request_id: str,
        superseded: Collection[str] = (),
    ) -> None:
        """Move a turn SERVED → PAIRED and drop its open `superseded` retries, in one transaction.

        A turn that was dropped, or judged by its user, keeps its state; the next state is recorded all the same.
        """
        at, next_state = self._clock(), self._redactor.next_state(next_state)
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
                _drop(db, other, DropReason.SUPERSEDED, f"continued: {turn_id}", at=at)

    @chat_write(is_synced=True)
    def drop(
        self,
        db: sqlite3.Connection,
        turn_id: str,
        reason: DropReason,
        detail: str = "",
        *,
        seen_feedback: Collection[str] | None = None,
    ) -> None:
        """Drop a turn from any state before LEASED.

        The call changes nothing if the turn's feedback is not that of the ids `seen_feedback`, which the caller knows.
        A reason that says "no answer" does not end a turn that has feedback.
        """
        if not feedback.has_news(db, find_turn(db, turn_id), seen_feedback):
            _drop(db, turn_id, reason, detail, at=self._clock())

    @chat_write(is_synced=True)
    def leave_out(self, db: sqlite3.Connection, turn_id: str, detail: str) -> None:
        """Drop a turn as OPTED_OUT from any state before LEASED, and the demonstrations of it that still wait."""
        at = self._clock()
        _drop(db, turn_id, DropReason.OPTED_OUT, detail, at=at)
        written = "SELECT id FROM turn WHERE demonstration_of = ? AND state = 'sampled'"
        for (row,) in db.execute(written, (find_turn(db, turn_id),)).fetchall():
            move(db, row, TurnState.DROPPED, at=at, reason=DropReason.OPTED_OUT, detail=detail)

    async def expire(self, older_than: float) -> list[str]:
        """Drop the SERVED turns that finished before `older_than` as NO_NEXT_STATE; return their ids."""
        expired: list[str] = []
        while some := await self._expire_some(older_than):
            expired += some
        return expired

    @write
    def _expire_some(self, db: sqlite3.Connection, older_than: float) -> list[str]:
        at = self._clock()
        rows = db.execute(
            "SELECT id, turn_id FROM open_turn JOIN turn USING (id) WHERE finished_at < ? AND of_episode IS NULL"
            " ORDER BY finished_at LIMIT ?",
            (older_than, _EXPIRED_AT_ONCE),
        ).fetchall()
        for row, _ in rows:
            if not _has_feedback(db, row, TurnState.SERVED, at=at):
                move(db, row, TurnState.DROPPED, at=at, reason=DropReason.NO_NEXT_STATE)
        return [turn_id for _, turn_id in rows]


def insert_request(db: sqlite3.Connection, request: Request, *, prompt_tokens: int, outcome: str) -> int:
    """Insert the row of a request and return its id. The caller has masked its secrets."""
    # The first token waits for this: all pieces are looked up at once.
    prompt, messages = blobs.prompt_pieces(request.prompt_ids), blobs.message_pieces(request.messages)
    sampling, *rest = blobs.put(db, [blobs.text_piece(orjson.dumps(request.sampling).decode()), *prompt, *messages])
    row = db.execute(
        "INSERT INTO request (request_id, policy, user, session_id, received_at, outcome, episode, task, step,"
        " sampling, tools, template_kwargs, prompt_tokens, prompt, messages, in_episode)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            request.request_id,
            request.scope.policy,
            request.scope.user,
            request.scope.session_id,
            request.received_at,
            outcome,
            request.episode,
            request.task,
            request.step,
            sampling,
            blobs.put_text(db, request.tools_json),
            blobs.put_text(db, request.template_kwargs_json),
            prompt_tokens,
            pack_ids(rest[: len(prompt)]),
            pack_ids(rest[len(prompt) :]),
            request.in_episode,
        ),
    ).lastrowid
    pictures.put(db, int(row or 0), request.pictures)
    return int(row or 0)


def insert_reply(db: sqlite3.Connection, row: int, turn: Turn) -> None:
    """Insert the reply of a turn, exactly as sampled. The caller has masked its secrets."""
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


def abandon_interrupted(db: sqlite3.Connection) -> int:
    """Abandon the requests that the last process was generating when it ended; return their number."""
    return db.execute(
        "UPDATE request SET outcome = 'abandoned', reason = ?, detail = 'the server stopped' WHERE outcome = 'running'",
        (str(DropReason.INTERRUPTED),),
    ).rowcount


def _drop(db: sqlite3.Connection, turn_id: str, reason: DropReason, detail: str, *, at: float) -> None:
    row = find_turn(db, turn_id)
    (state,) = db.execute("SELECT state FROM turn WHERE id = ?", (row,)).fetchone()
    if reason in _UNANSWERED and _has_feedback(db, row, TurnState(state), at=at):
        return
    if state in (TurnState.LEASED, TurnState.TRAINED):  # these end through their lease or their version alone
        raise LedgerError(f"turn {turn_id} is {state} and cannot be dropped ({reason})")
    move(db, row, TurnState.DROPPED, at=at, reason=reason, detail=detail)


def _has_feedback(db: sqlite3.Connection, row: int, state: TurnState, *, at: float) -> bool:
    """Return True if the user rated or commented the turn. A SERVED one becomes JUDGED by that feedback."""
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

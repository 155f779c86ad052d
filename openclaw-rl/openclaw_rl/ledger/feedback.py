"""Feedback of users on replies, and its effect on the turns.

The user wins over the judge: a value is the turn's verdict from then on. The effect depends on the turn's state:

    served, paired          judged by it                    (a comment alone waits: a next state may follow)
    judged                  the verdict is replaced
    sampled                 scored again, if the sign differs or there is a comment (which is a hint)
    a step with its credit  recorded: its group was compared as it was
    leased, trained         late: recorded; if the turn ever waits again, it takes effect then
    dropped                 judged, if the turn only lacked an answer (`states.REVIVABLE`); else only recorded

`has_news` compares the pieces of feedback that a writer has read with those on file. A verdict, a score or a drop that
was under way while the user gave feedback is not written: the turn is scored again, with all the feedback.

A demonstration is a reply that a user wrote as the right one, and a turn of its own. It answers the prompt of the turn
that it corrects. It begins as `sampled` (it needs no judge and no score). From there it is leased, trained, returned
and dropped like any sample, independently of the turn that it corrects. No policy sampled its tokens: its log-probs are
zeros, its version is the tip of its day, and it never becomes stale.
"""

import sqlite3
from collections.abc import Collection

import orjson

from openclaw_rl.errors import FeedbackReused, LedgerError
from openclaw_rl.ledger import blobs, deletion, groups, pictures, versions, wishes
from openclaw_rl.ledger.blobs import pack_floats, pack_ids, pack_mask, pack_runs
from openclaw_rl.ledger.records import Effect, FeedbackOutcome, FeedbackTarget, read_verdict
from openclaw_rl.ledger.states import REVIVABLE, append_event, move
from openclaw_rl.ledger.store import LedgerPart, read, write
from openclaw_rl.messages import Message
from openclaw_rl.types import DropReason, Feedback, Ids, TurnKey, TurnState, Verdict, VersionRun, WrittenReply

_NEVER_TRAINED = (
    DropReason.OPTED_OUT,
    DropReason.RECORD_ONLY,
    DropReason.REDACTED,
    DropReason.EVAL,
    DropReason.UNSUPPORTED_CONTENT,
)
"""Turns whose owner forbids training on them, whose prompt is not kept or not taken, or that evaluate: no demonstration
either."""


class UserFeedback(LedgerPart):
    """Feedback from users, which may change a turn's verdict and its state."""

    @read
    def feedback_target(
        self, db: sqlite3.Connection, *, user: str, turn_id: str | None = None, session_id: str | None = None
    ) -> FeedbackTarget | None:
        """Return this user's turn of that id, or the newest turn of that session; None if there is none."""
        found = db.execute(
            "SELECT turn_id, prompt_tokens, turn.reason FROM turn JOIN request USING (id)"
            " WHERE +user = ? AND demonstration_of IS NULL AND practice IS NULL AND "
            + ("session_id = ? ORDER BY request.id DESC LIMIT 1" if turn_id is None else "turn_id = ?"),
            (user, session_id if turn_id is None else turn_id),
        ).fetchone()
        if found is None:
            return None
        reason = None if found["reason"] is None else DropReason(found["reason"])
        return FeedbackTarget(found["turn_id"], found["prompt_tokens"], reason)

    @write
    def record_feedback(
        self, db: sqlite3.Connection, said: Feedback, *, user: str, demonstration: Ids | None = None, given: int = 0
    ) -> FeedbackOutcome:
        """Record feedback of a user and let it take effect.

        demonstration: the tokens of `said.demonstration` as a reply, its end included; without them no trainer gets it.
        given: how many of the leading ones are context, which no loss trains.
        The same feedback_id with the same content changes nothing and returns the first effect. Raises FeedbackReused
        for the same feedback_id with other content.
        """
        at, kept = self._clock(), self._redactor.feedback(said)
        ids = demonstration if kept.demonstration == said.demonstration else None  # ids would reveal a masked secret
        found = db.execute(
            "SELECT turn.id, turn.reason FROM turn JOIN request USING (id)"
            " WHERE turn_id = ? AND user = ? AND demonstration_of IS NULL AND practice IS NULL",
            (kept.turn_id, user),
        ).fetchone()
        if found is None:
            raise LedgerError(f"no turn {kept.turn_id}")
        row, reason = found
        known = db.execute(
            "SELECT turn, value, comment, demonstration, effect FROM feedback WHERE user = ? AND feedback_id = ?",
            (user, kept.feedback_id),
        ).fetchone()
        if known is not None:
            if tuple(known)[:4] != (row, kept.value, kept.comment, kept.demonstration):
                raise FeedbackReused(f"feedback_id {kept.feedback_id!r} was used for other feedback")
            return _outcome(db, row, kept, Effect(known["effect"]))
        if ids is not None and kept.demonstration is not None and reason not in _NEVER_TRAINED:
            _add_demonstration(db, row, kept.demonstration, WrittenReply(ids, given), at=at)
        effect = _take_effect(db, row, kept.value, kept.comment is not None, at=at)
        db.execute(
            "INSERT INTO feedback (turn, user, feedback_id, at, value, comment, demonstration, effect)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (row, user, kept.feedback_id, kept.at, kept.value, kept.comment, kept.demonstration, str(effect)),
        )
        return _outcome(db, row, kept, effect)

    @write
    def take_back_feedback(
        self, db: sqlite3.Connection, turn_id: str, *, user: str, prefix: str, key: TurnKey | None = None
    ) -> FeedbackOutcome | None:
        """Take back the newest feedback on a turn whose id begins with `prefix`; None if there is none.

        The turn is then where it would be without it: judged by the feedback before, else by its next state, else open
        under `key`. A wish that only this turn asked for ends. What a trainer has or has trained on stays as it is: the
        outcome's effect is `late`.
        """
        at = self._clock()
        found = db.execute(
            "SELECT feedback.id, turn.id, feedback_id, effect, state, reason FROM feedback"
            " JOIN turn ON turn.id = feedback.turn"
            " WHERE turn_id = ? AND user = ? AND substr(feedback_id, 1, ?) = ? ORDER BY feedback.id DESC LIMIT 1",
            (turn_id, user, len(prefix), prefix),
        ).fetchone()
        if found is None:
            return None
        said, row, feedback_id, effect, state, reason = found
        is_taken = state in (TurnState.LEASED, TurnState.TRAINED) or _has_credit(db, row)
        if is_taken and effect != Effect.LATE:
            return FeedbackOutcome(feedback_id, turn_id, TurnState(state), Effect.LATE)
        db.execute("DELETE FROM feedback WHERE id = ?", (said,))
        db.execute("UPDATE counter SET n = n - 1 WHERE name = ?", (f"feedback.{effect}",))
        after = Effect.RECORDED
        if not is_taken and (state != TurnState.DROPPED or reason in REVIVABLE):
            after = _without(db, row, TurnState(state), key, at=at)
        (state,) = db.execute("SELECT state FROM turn WHERE id = ?", (row,)).fetchone()
        return FeedbackOutcome(feedback_id, turn_id, TurnState(state), after)


def catch_up(db: sqlite3.Connection, row: int, *, at: float) -> None:
    """Let late feedback take effect: a trainer had the turn, and it waits again."""
    late = db.execute("SELECT value, comment FROM feedback WHERE turn = ? AND effect = 'late' ORDER BY id", (row,))
    said = late.fetchall()
    if not said:
        return
    values = [value for value, _ in said if value is not None]
    effect = _take_effect(
        db, row, values[-1] if values else None, any(comment is not None for _, comment in said), at=at
    )
    db.execute("UPDATE feedback SET effect = ? WHERE turn = ? AND effect = 'late'", (str(effect), row))


def has_news(db: sqlite3.Connection, row: int, seen: Collection[str] | None) -> bool:
    """Return True if a turn has other feedback than that of the ids `seen`, which its reader knew.

    None: the reader does not ask.
    """
    if seen is None:
        return False
    # Ids and no count: one piece may be taken back and another one given meanwhile.
    said = {feedback_id for (feedback_id,) in db.execute("SELECT feedback_id FROM feedback WHERE turn = ?", (row,))}
    return said != set(seen)


def is_rated(db: sqlite3.Connection, row: int) -> bool:
    """Return True if the user gave the turn a value."""
    return bool(db.execute("SELECT 1 FROM feedback WHERE turn = ? AND value IS NOT NULL", (row,)).fetchone())


def has_comment(db: sqlite3.Connection, row: int) -> bool:
    return bool(db.execute("SELECT 1 FROM feedback WHERE turn = ? AND comment IS NOT NULL", (row,)).fetchone())


def put_verdict(db: sqlite3.Connection, row: int, verdict: Verdict) -> None:
    """Store the verdict of a turn; it replaces an earlier one."""
    votes = orjson.dumps(verdict.votes).decode()
    db.execute(
        "REPLACE INTO verdict VALUES (?, ?, ?, ?, ?)", (row, verdict.value, votes, verdict.source, verdict.rationale)
    )


def _add_demonstration(db: sqlite3.Connection, of: int, text: str, written: WrittenReply, *, at: float) -> None:
    """Insert a demonstration as a turn, and drop an earlier one of the same turn that still waits."""
    turn_id, policy = db.execute("SELECT turn_id, policy FROM turn WHERE id = ?", (of,)).fetchone()
    earlier = db.execute("SELECT id, state FROM turn WHERE demonstration_of = ?", (of,)).fetchall()
    for row, state in earlier:
        if state == TurnState.SAMPLED:
            move(db, row, TurnState.DROPPED, at=at, reason=DropReason.SUPERSEDED, detail="a newer demonstration")
    blobs.touch(db, deletion.pieces_of(db, [of]))  # the request row below refers to them
    name = f"{turn_id}-demo{len(earlier) + 1 if earlier else ''}"
    tip, ids = versions.tip_of(db, policy), written.ids
    row = db.execute(
        "INSERT INTO request (request_id, policy, user, session_id, received_at, outcome, episode, task, step,"
        " sampling, tools, template_kwargs, prompt_tokens, prompt, messages)"
        " SELECT ?, policy, user, session_id, ?, 'served', episode, task, step,"
        " sampling, tools, template_kwargs, prompt_tokens, prompt, messages FROM request WHERE id = ?",
        (name, at, of),
    ).lastrowid
    pictures.copy(db, row or 0, of)
    db.execute(
        "INSERT INTO turn (id, turn_id, state, oldest_version, response_tokens, sampled_at, demonstration_of, policy)"
        " VALUES (?, ?, 'sampled', ?, ?, ?, ?, ?)",
        (row, name, tip, len(ids), at, of, policy),
    )
    (message,) = blobs.put_messages(db, [Message(role="assistant", content=text)])
    log_probs, runs = pack_floats((0.0,) * len(ids)), pack_runs((VersionRun(tip, len(ids)),))
    db.execute(
        "INSERT INTO reply VALUES (?, ?, 'stop', 0, ?, ?, ?, ?, ?)",
        (row, at, message, pack_ids(ids), log_probs, pack_mask(written.loss_mask), runs),
    )
    db.execute("INSERT INTO sample (id, temperature, is_demonstration) VALUES (?, 1, 1)", (row,))
    append_event(db, row or 0, TurnState.SAMPLED, at=at, detail=f"demonstration for {turn_id}")


def _take_effect(db: sqlite3.Connection, row: int, value: float | None, has_comment: bool, *, at: float) -> Effect:
    if value is None and not has_comment:
        return Effect.RECORDED
    state, reason, episode = db.execute("SELECT state, reason, of_episode FROM turn WHERE id = ?", (row,)).fetchone()
    if episode is not None and (state == TurnState.DROPPED or not groups.is_unscored(db, episode)):
        return Effect.RECORDED  # its group has its credit, in which each step was compared with the others
    if state in (TurnState.LEASED, TurnState.TRAINED):
        return Effect.LATE
    if state == TurnState.DROPPED and reason not in REVIVABLE:
        return Effect.RECORDED
    before = read_verdict(db, row)
    sign = None if value is None else (value > 0) - (value < 0)
    if sign is not None:
        put_verdict(db, row, Verdict(sign, (), "feedback", f"the user's {value:g}"))
    if state == TurnState.JUDGED:
        return Effect.RECORDED if sign is None else Effect.JUDGED
    if state == TurnState.SAMPLED and not has_comment and before is not None and before.value == sign:
        return Effect.RECORDED
    if sign is None and state in (TurnState.SERVED, TurnState.PAIRED):
        return Effect.RECORDED
    db.execute("DELETE FROM sample WHERE id = ?", (row,))  # scored before: the feedback may change the score
    move(db, row, TurnState.JUDGED, at=at, detail="feedback" + ("" if sign is None else f" {sign:+d}"))
    db.execute("UPDATE feedback SET effect = 'rescored' WHERE turn = ? AND effect = 'late'", (row,))
    return Effect.RESCORED if state == TurnState.SAMPLED or sign is None else Effect.JUDGED


def _without(db: sqlite3.Connection, row: int, state: TurnState, key: TurnKey | None, *, at: float) -> Effect:
    """Give a turn the verdict and the state that it has without the feedback that was deleted."""
    detail = "feedback taken back"
    before = db.execute(
        "SELECT value FROM feedback WHERE turn = ? AND value IS NOT NULL ORDER BY id DESC LIMIT 1", (row,)
    ).fetchone()
    if before is None and state in (TurnState.SERVED, TurnState.PAIRED):
        return Effect.RECORDED
    db.execute("DELETE FROM sample WHERE id = ?", (row,))
    wishes.take_back(db, row, at=at)  # the next score notes the wish that is left, if any
    if before is not None:
        (value,) = before
        put_verdict(db, row, Verdict((value > 0) - (value < 0), (), "feedback", f"the user's {value:g}"))
        if state != TurnState.JUDGED:
            move(db, row, TurnState.JUDGED, at=at, detail=detail)
        return Effect.RESCORED
    db.execute("DELETE FROM verdict WHERE id = ?", (row,))
    (episode,) = db.execute("SELECT of_episode FROM turn WHERE id = ?", (row,)).fetchone()
    if episode is not None and state == TurnState.JUDGED:
        return Effect.RESCORED  # without a verdict it waits for its group, with the outcome alone
    if db.execute("SELECT 1 FROM next_state WHERE id = ?", (row,)).fetchone():
        move(db, row, TurnState.PAIRED, at=at, detail=detail)
    elif key is not None:
        move(db, row, TurnState.SERVED, at=at, detail=detail)
        (finished_at,) = db.execute("SELECT finished_at FROM reply WHERE id = ?", (row,)).fetchone()
        insert_open(db, row, key, finished_at)
    elif state != TurnState.DROPPED:
        move(db, row, TurnState.DROPPED, at=at, reason=DropReason.NO_NEXT_STATE, detail=detail)
    return Effect.RESCORED


def _has_credit(db: sqlite3.Connection, row: int) -> bool:
    """Return True for a step whose group has given it credit."""
    return db.execute("SELECT 1 FROM credit WHERE id = ?", (row,)).fetchone() is not None


def insert_open(db: sqlite3.Connection, row: int, key: TurnKey, finished_at: float) -> None:
    """Insert the key of a turn that waits for its next state."""
    place = orjson.dumps(key.place).decode()
    db.execute(
        "INSERT INTO open_turn VALUES (?, ?, ?, ?, ?, ?)",
        (row, finished_at, key.reply_hash, key.before_hash, key.history_hash, place),
    )


def _outcome(db: sqlite3.Connection, row: int, said: Feedback, effect: Effect) -> FeedbackOutcome:
    (state,) = db.execute("SELECT state FROM turn WHERE id = ?", (row,)).fetchone()
    demonstration = None
    if said.demonstration is not None:
        demonstration = db.execute(
            "SELECT turn_id FROM turn JOIN request USING (id) WHERE demonstration_of = ? ORDER BY id DESC", (row,)
        ).fetchone()
    return FeedbackOutcome(
        feedback_id=said.feedback_id,
        turn_id=said.turn_id,
        state=TurnState(state),
        effect=effect,
        demonstration_id=None if demonstration is None else demonstration[0],
    )

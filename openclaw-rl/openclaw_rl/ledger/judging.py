"""What the judge and the method take, and what they give back."""

import sqlite3
from collections.abc import Collection

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import blobs, feedback, leases
from openclaw_rl.ledger.blobs import pack_floats, pack_ids, pack_mask, pack_runs
from openclaw_rl.ledger.records import read_judged
from openclaw_rl.ledger.states import find_turn, move
from openclaw_rl.types import DropReason, JudgedTurn, Sample, TurnState, Verdict


def in_state(db: sqlite3.Connection, state: TurnState, limit: int, skip: Collection[str]) -> list[JudgedTurn]:
    """The oldest `limit` turns of a state, less those whose ids are in `skip` (someone works on them)."""
    rows = db.execute(
        "SELECT id, turn_id FROM turn WHERE state = ? ORDER BY id LIMIT ?", (str(state), limit + len(skip))
    )
    wanted = [row for row, turn_id in rows if turn_id not in skip][:limit]
    return [read_judged(db, row) for row in wanted]


def record_verdict(db: sqlite3.Connection, turn_id: str, verdict: Verdict | None, *, at: float) -> None:
    """What becomes of a 0, or of no verdict at all, is the method's to say: it may still find a hint. A user who was
    faster than the judge has the last word."""
    row = find_turn(db, turn_id)
    if feedback.is_rated(db, row):
        return
    (state,) = db.execute("SELECT state FROM turn WHERE id = ?", (row,)).fetchone()
    if state != TurnState.PAIRED:
        raise LedgerError(f"turn {turn_id} is {state} and cannot become judged")
    move(db, row, TurnState.JUDGED, at=at, detail="no verdict" if verdict is None else f"{verdict.value:+d}")
    if verdict is not None:
        feedback.put_verdict(db, row, verdict)


def record_sample(db: sqlite3.Connection, sample: Sample, *, seen_feedback: int | None, at: float) -> None:
    """Only what differs from the turn is stored again, as it would be stored: equal bytes are equal contents."""
    row = find_turn(db, sample.sample_id)
    if feedback.has_news(db, row, seen_feedback):
        return
    move(db, row, TurnState.SAMPLED, at=at)
    turn = db.execute(
        "SELECT prompt, ids, log_probs, mask, versions FROM request JOIN reply USING (id) WHERE id = ?", (row,)
    ).fetchone()
    mask = pack_mask(sample.loss_mask)
    own = {
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
    db.execute(
        "UPDATE turn SET is_tool = ?, sampled_at = ?, oldest_version = ? WHERE id = ?",
        (sample.is_tool_turn, at, sample.oldest_version, row),
    )


def drop_oldest(db: sqlite3.Connection, state: TurnState, keep: int, *, at: float, limit: int = 1000) -> int:
    """At most `limit` in one transaction: chats wait behind it."""
    (waiting,) = db.execute("SELECT coalesce(sum(n), 0) FROM counter WHERE name = ?", (str(state),)).fetchone()
    if waiting <= keep:
        return 0
    most = min(waiting - keep, limit)
    if state is TurnState.SAMPLED:
        both = [*leases.oldest(db, is_tool=False, limit=most), *leases.oldest(db, is_tool=True, limit=most)]
        rows = [row for _, row in sorted(both)][:most]
    else:
        found = db.execute("SELECT id FROM turn WHERE state = ? ORDER BY id LIMIT ?", (str(state), most))
        rows = [row for (row,) in found.fetchall()]
    for row in rows:
        move(db, row, TurnState.DROPPED, at=at, reason=DropReason.BACKLOG, detail=f"{waiting} were {state}")
    return len(rows)

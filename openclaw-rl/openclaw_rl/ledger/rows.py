"""Rows back to nouns."""

import sqlite3

import orjson

from openclaw_rl.ledger import pieces
from openclaw_rl.ledger.codec import unpack_floats, unpack_ids, unpack_mask, unpack_runs
from openclaw_rl.types import (
    DropReason,
    Feedback,
    JudgedTurn,
    NextState,
    Request,
    Sample,
    SamplingParams,
    Scope,
    Turn,
    Verdict,
    VersionRun,
)


def read_request(db: sqlite3.Connection, row: int) -> Request:
    found = db.execute("SELECT * FROM request WHERE id = ?", (row,)).fetchone()
    return Request(
        request_id=found["request_id"],
        scope=Scope(found["user"], found["session_id"], found["policy"]),
        received_at=found["received_at"],
        messages=pieces.get_messages(db, unpack_ids(found["messages"])),
        tools_json=pieces.get_text(db, found["tools"]),
        template_kwargs_json=pieces.get_text(db, found["template_kwargs"]),
        prompt_ids=pieces.get_prompt(db, found["prompt"]),
        sampling=_sampling(pieces.get_text(db, found["sampling"]) or "{}"),
        episode=found["episode"],
        task=found["task"],
        step=found["step"],
    )


def _sampling(text: str) -> SamplingParams:
    fields = orjson.loads(text)
    return SamplingParams(**{**fields, "stop": tuple(fields["stop"])})


def read_turn(db: sqlite3.Connection, row: int) -> Turn:
    """`drop` is the reason the turn has today."""
    found = db.execute(
        "SELECT reply.*, turn_id, turn.reason, request_id FROM reply JOIN turn USING (id) JOIN request USING (id)"
        " WHERE id = ?",
        (row,),
    ).fetchone()
    response_ids = unpack_ids(found["ids"])
    (reply,) = pieces.get_messages(db, [found["message"]])
    return Turn(
        turn_id=found["turn_id"],
        request_id=found["request_id"],
        finished_at=found["finished_at"],
        response_ids=response_ids,
        rollout_log_probs=unpack_floats(found["log_probs"]),
        loss_mask=unpack_mask(found["mask"], len(response_ids)),
        versions=unpack_runs(found["versions"]),
        finish_reason=found["finish_reason"],
        reply=reply,
        drop=None if found["reason"] is None else DropReason(found["reason"]),
        cached_tokens=found["cached_tokens"],
    )


def read_next_state(db: sqlite3.Connection, row: int) -> NextState | None:
    found = db.execute("SELECT messages, reactions FROM next_state WHERE id = ?", (row,)).fetchone()
    if found is None:
        return None
    messages = pieces.get_messages(db, unpack_ids(found["messages"]))
    return NextState(messages, tuple(orjson.loads(found["reactions"] or "[]")))


def read_verdict(db: sqlite3.Connection, row: int) -> Verdict | None:
    found = db.execute("SELECT value, votes, source, rationale FROM verdict WHERE id = ?", (row,)).fetchone()
    if found is None:
        return None
    value, votes, source, rationale = found
    return Verdict(value=value, votes=tuple(orjson.loads(votes)), source=source, rationale=rationale)


def read_feedback(db: sqlite3.Connection, row: int) -> tuple[Feedback, ...]:
    """Oldest first."""
    found = db.execute(
        "SELECT feedback_id, turn_id, at, value, comment, demonstration FROM feedback JOIN turn ON turn.id = turn"
        " WHERE turn = ? ORDER BY feedback.id",
        (row,),
    )
    return tuple(Feedback(*fields) for fields in found)


def read_judged(db: sqlite3.Connection, row: int) -> JudgedTurn:
    """A turn that feedback judged may have an empty next state: nothing has followed it yet."""
    next_state = read_next_state(db, row) or NextState(())
    return JudgedTurn(
        read_request(db, row), read_turn(db, row), next_state, read_verdict(db, row), read_feedback(db, row)
    )


_SAMPLE = """
SELECT turn_id, is_tool, temperature, reward, scored_version, extra, teacher_log_probs, student_log_probs,
    is_demonstration,
    coalesce(sample.prompt, request.prompt) AS prompt, coalesce(sample.ids, reply.ids) AS ids,
    coalesce(sample.log_probs, reply.log_probs) AS log_probs, coalesce(sample.mask, reply.mask) AS mask,
    coalesce(sample.versions, reply.versions) AS versions
FROM sample JOIN turn USING (id) JOIN request USING (id) JOIN reply USING (id) WHERE id = ?
"""


def read_sample(db: sqlite3.Connection, row: int) -> Sample | None:
    found = db.execute(_SAMPLE, (row,)).fetchone()
    if found is None:
        return None
    response_ids = unpack_ids(found["ids"])
    teacher, student = found["teacher_log_probs"], found["student_log_probs"]
    return Sample(
        sample_id=found["turn_id"],
        prompt_ids=pieces.get_prompt(db, found["prompt"]),
        response_ids=response_ids,
        loss_mask=unpack_mask(found["mask"] or None, len(response_ids)),
        rollout_log_probs=unpack_floats(found["log_probs"]),
        versions=unpack_runs(found["versions"]),
        temperature=found["temperature"],
        is_tool_turn=bool(found["is_tool"]),
        reward=found["reward"],
        teacher_log_probs=None if teacher is None else unpack_floats(teacher),
        student_log_probs=None if student is None else unpack_floats(student),
        scored_version=found["scored_version"],
        extra_json=found["extra"],
        is_demonstration=bool(found["is_demonstration"]),
    )


def read_versions_of(db: sqlite3.Connection, row: int) -> tuple[VersionRun, ...]:
    """The versions that sampled a sample's tokens."""
    (versions,) = db.execute(
        "SELECT coalesce(sample.versions, reply.versions) FROM sample JOIN reply USING (id) WHERE id = ?", (row,)
    ).fetchone()
    return unpack_runs(versions)

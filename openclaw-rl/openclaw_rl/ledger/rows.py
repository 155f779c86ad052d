"""Rows back to nouns."""

import sqlite3

import orjson

from openclaw_rl.ledger import pieces
from openclaw_rl.ledger.codec import unpack_floats, unpack_ids, unpack_mask, unpack_runs
from openclaw_rl.types import (
    DropReason,
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


def read_request(db: sqlite3.Connection, row: int, *, with_messages: bool = True) -> Request:
    (
        request_id,
        policy,
        user,
        session_id,
        received_at,
        episode,
        task,
        step,
        sampling,
        tools,
        kwargs,
        prompt,
        messages,
    ) = db.execute(
        "SELECT request_id, policy, user, session_id, received_at, episode, task, step, sampling, tools,"
        " template_kwargs, prompt, messages FROM request WHERE id = ?",
        (row,),
    ).fetchone()
    return Request(
        request_id=request_id,
        scope=Scope(user, session_id, policy),
        received_at=received_at,
        messages=pieces.get_messages(db, unpack_ids(messages)) if with_messages else (),
        tools_json=pieces.get_text(db, tools),
        template_kwargs_json=pieces.get_text(db, kwargs),
        prompt_ids=pieces.get_prompt(db, prompt),
        sampling=_sampling(pieces.get_text(db, sampling) or "{}"),
        episode=episode,
        task=task,
        step=step,
    )


def _sampling(text: str) -> SamplingParams:
    fields = orjson.loads(text)
    return SamplingParams(**{**fields, "stop": tuple(fields["stop"])})


def read_turn(db: sqlite3.Connection, row: int) -> Turn:
    """`drop` is the reason the turn has today."""
    turn_id, reason, request_id, finished_at, finish_reason, cached, message, ids, log_probs, mask, versions = (
        db.execute(
            "SELECT turn_id, turn.reason, request_id, finished_at, finish_reason, cached_tokens, message, ids, log_probs, mask, versions"
            " FROM reply JOIN turn USING (id) JOIN request USING (id) WHERE id = ?",
            (row,),
        ).fetchone()
    )
    response_ids = unpack_ids(ids)
    (reply,) = pieces.get_messages(db, [message])
    return Turn(
        turn_id=turn_id,
        request_id=request_id,
        finished_at=finished_at,
        response_ids=response_ids,
        rollout_log_probs=unpack_floats(log_probs),
        loss_mask=unpack_mask(mask, len(response_ids)),
        versions=unpack_runs(versions),
        finish_reason=finish_reason,
        reply=reply,
        drop=None if reason is None else DropReason(reason),
        cached_tokens=cached,
    )


def read_next_state(db: sqlite3.Connection, row: int) -> NextState | None:
    found = db.execute("SELECT messages, reactions FROM next_state WHERE id = ?", (row,)).fetchone()
    if found is None:
        return None
    messages, reactions = found
    return NextState(
        messages=pieces.get_messages(db, unpack_ids(messages)),
        reactions=tuple(orjson.loads(reactions)) if reactions else (),
    )


def read_verdict(db: sqlite3.Connection, row: int) -> Verdict | None:
    found = db.execute("SELECT value, votes, source, rationale FROM verdict WHERE id = ?", (row,)).fetchone()
    if found is None:
        return None
    value, votes, source, rationale = found
    return Verdict(value=value, votes=tuple(orjson.loads(votes)), source=source, rationale=rationale)


def read_judged(db: sqlite3.Connection, row: int) -> JudgedTurn:
    next_state = read_next_state(db, row)
    assert next_state is not None, "only paired turns are asked for"
    return JudgedTurn(read_request(db, row), read_turn(db, row), next_state, read_verdict(db, row))


def read_sample(db: sqlite3.Connection, row: int) -> Sample | None:
    found = db.execute(
        "SELECT turn_id, is_tool, temperature, reward, scored_version, extra, teacher_log_probs, student_log_probs,"
        " coalesce(sample.prompt, request.prompt), coalesce(sample.ids, reply.ids),"
        " coalesce(sample.log_probs, reply.log_probs), coalesce(sample.mask, reply.mask), coalesce(sample.versions, reply.versions)"
        " FROM sample JOIN turn USING (id) JOIN request USING (id) JOIN reply USING (id) WHERE id = ?",
        (row,),
    ).fetchone()
    if found is None:
        return None
    sample_id, is_tool, temperature, reward, scored, extra, teacher, student, prompt, ids, log_probs, mask, versions = (
        found
    )
    response_ids = unpack_ids(ids)
    return Sample(
        sample_id=sample_id,
        prompt_ids=pieces.get_prompt(db, prompt),
        response_ids=response_ids,
        loss_mask=unpack_mask(mask or None, len(response_ids)),  # b"": all True, though the turn's is not
        rollout_log_probs=unpack_floats(log_probs),
        versions=unpack_runs(versions),
        temperature=temperature,
        is_tool_turn=bool(is_tool),
        reward=reward,
        teacher_log_probs=None if teacher is None else unpack_floats(teacher),
        student_log_probs=None if student is None else unpack_floats(student),
        scored_version=scored,
        extra_json=extra,
    )


def read_versions_of(db: sqlite3.Connection, row: int) -> tuple[VersionRun, ...]:
    """The versions that sampled a sample's tokens."""
    (versions,) = db.execute(
        "SELECT coalesce(sample.versions, reply.versions) FROM sample JOIN reply USING (id) WHERE id = ?", (row,)
    ).fetchone()
    return unpack_runs(versions)

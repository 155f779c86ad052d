"""Replies that users wrote as the right ones, as turns of their own.

A demonstration answers the prompt of the turn it corrects. It begins as `sampled` (there is nothing to judge and
nothing to score) and from there is leased, trained, returned and dropped like any sample; the turn it corrects goes its
own way. Nobody sampled its tokens: its log-probs are zeros, it stands at the tip of its day, and it grows never stale.
"""

import sqlite3

from openclaw_rl.ledger import deletion, meta, pieces
from openclaw_rl.ledger.codec import pack_floats, pack_ids, pack_runs
from openclaw_rl.ledger.states import move, tell
from openclaw_rl.messages import Message
from openclaw_rl.types import DropReason, Ids, TurnState, VersionRun


def add(db: sqlite3.Connection, of: int, text: str, ids: Ids, *, at: float) -> str:
    """The id of the new turn. An earlier demonstration of the same turn that still waits gives way."""
    (turn_id,) = db.execute("SELECT turn_id FROM turn WHERE id = ?", (of,)).fetchone()
    earlier = db.execute("SELECT id, state FROM turn WHERE demonstration_of = ?", (of,)).fetchall()
    for row, state in earlier:
        if state == TurnState.SAMPLED:
            move(db, row, TurnState.DROPPED, at=at, reason=DropReason.SUPERSEDED, detail="a newer demonstration")
    pieces.touch(db, deletion.pieces_of(db, [of]))  # its own request, below, refers to all of them
    name = f"{turn_id}-demo{len(earlier) + 1 if earlier else ''}"
    tip = meta.get_int(db, "tip")
    row = db.execute(
        "INSERT INTO request (request_id, policy, user, session_id, received_at, outcome, episode, task, step,"
        " sampling, tools, template_kwargs, prompt_tokens, prompt, messages)"
        " SELECT ?, policy, user, session_id, ?, 'served', episode, task, step,"
        " sampling, tools, template_kwargs, prompt_tokens, prompt, messages FROM request WHERE id = ?",
        (name, at, of),
    ).lastrowid
    db.execute(
        "INSERT INTO turn (id, turn_id, state, oldest_version, response_tokens, sampled_at, demonstration_of)"
        " VALUES (?, ?, 'sampled', ?, ?, ?, ?)",
        (row, name, tip, len(ids), at, of),
    )
    (message,) = pieces.put_messages(db, [Message(role="assistant", content=text)])
    log_probs, versions = pack_floats((0.0,) * len(ids)), pack_runs((VersionRun(tip, len(ids)),))
    db.execute(
        "INSERT INTO reply VALUES (?, ?, 'stop', 0, ?, ?, ?, NULL, ?)",
        (row, at, message, pack_ids(ids), log_probs, versions),
    )
    db.execute("INSERT INTO sample (id, temperature, is_demonstration) VALUES (?, 1, 1)", (row,))
    tell(db, row or 0, TurnState.SAMPLED, at=at, detail=f"demonstration for {turn_id}")
    return name

"""Steps of an episode: its main turns, numbered and paired in the order of their requests.

A request answers the newest reply that no request has answered yet, whatever its text: some harnesses leave a reply
that they could not read out of the history. Only where several replies are open (requests at once, the same request
again) the longest common history decides.
"""

import sqlite3
from dataclasses import replace

from openclaw_rl.errors import EpisodeRefused
from openclaw_rl.ledger import blobs
from openclaw_rl.ledger.blobs import pack_ids, unpack_ids
from openclaw_rl.ledger.states import move
from openclaw_rl.ledger.store import LedgerPart, chat_write
from openclaw_rl.types import DropReason, EpisodeState, EpisodeTurn, Ids, NextState, Request, Split, TurnState

COUNTED = "(turn.reason IS NULL OR turn.reason <> 'cancelled')"
"""A cancelled reply reached no environment: it is no step."""


class Steps(LedgerPart):
    """Pairing inside an episode."""

    @chat_write(is_synced=False)
    def continue_episode(self, db: sqlite3.Connection, request_id: str) -> str | None:
        """Record the messages of a request of an episode as the next state of the reply that it answers.

        Return the turn, or None if no reply is open. The request is recorded already.
        """
        found = db.execute(
            "SELECT id, in_episode, messages, received_at FROM request WHERE request_id = ? AND in_episode IS NOT NULL",
            (request_id,),
        ).fetchone()
        if found is None:
            return None
        new = unpack_ids(found["messages"])
        turns = db.execute(
            "SELECT turn.id, turn_id, turn.state, messages, message FROM turn JOIN request USING (id) JOIN reply"
            f" USING (id) WHERE of_episode = ? AND turn.id < ? AND finished_at <= ? AND {COUNTED}"
            " AND NOT EXISTS (SELECT 1 FROM next_state WHERE next_state.id = turn.id) ORDER BY turn.id",
            (found["in_episode"], found["id"], found["received_at"]),
        ).fetchall()
        # A request again, without a new message, asks for another reply: it answers none.
        answered = [(shared, turn) for turn in turns if (shared := _shared(turn, new)) < len(new)]
        if not answered:
            return None
        shared, turn = max(answered, key=lambda pair: (pair[0], pair[1]["id"]))
        observation = _observation(db, new[shared:])
        if not observation:
            return None
        next_state = self._redactor.next_state(NextState(blobs.get_messages(db, observation)))
        if turn["state"] == TurnState.SERVED:
            move(db, turn["id"], TurnState.PAIRED, at=self._clock())
        packed = pack_ids(blobs.put_messages(db, next_state.messages))
        db.execute("INSERT INTO next_state VALUES (?, ?, ?, NULL)", (turn["id"], request_id, packed))
        return str(turn["turn_id"])


# For other transactions


def begun(db: sqlite3.Connection, request: Request) -> Request:
    """Return a request with its place in its episode. Raises EpisodeRefused when the episode is over."""
    found = db.execute("SELECT state FROM episode WHERE id = ?", (request.in_episode,)).fetchone()
    if found is None or found[0] != EpisodeState.RUNNING:
        raise EpisodeRefused(
            f"episode {request.episode!r} is {'gone' if found is None else found[0]}: it takes no more requests",
            code="episode_over",
        )
    (before,) = db.execute(
        "SELECT count(*) FROM request LEFT JOIN turn USING (id) WHERE in_episode = ? AND request.outcome <> 'abandoned'"
        f" AND {COUNTED}",
        (request.in_episode,),
    ).fetchone()
    return replace(request, step=before + 1)


def why_untrained(db: sqlite3.Connection, episode: int) -> DropReason | None:
    """Return the reason why a turn that finishes now in this episode will not be trained on, if there is one."""
    state, split = db.execute(
        "SELECT episode.state, split FROM episode JOIN episode_group ON episode_group.id = grp WHERE episode.id = ?",
        (episode,),
    ).fetchone()
    if split == Split.EVAL:
        return DropReason.EVAL
    return {
        EpisodeState.ABORTED: DropReason.EPISODE_ABORTED,
        EpisodeState.EXPIRED: DropReason.EPISODE_EXPIRED,
    }.get(EpisodeState(state))


def number(db: sqlite3.Connection, row: int) -> None:
    """Number the steps anew: a request that was counted when a later one came may have been cancelled."""
    turns = db.execute(
        f"SELECT turn.id, {COUNTED} AS is_step FROM turn WHERE of_episode = ? ORDER BY turn.id", (row,)
    ).fetchall()
    step = 0
    for turn, is_step in turns:
        step += is_step
        db.execute("UPDATE request SET step = ? WHERE id = ?", (step if is_step else None, turn))


def of_episode(db: sqlite3.Connection, row: int) -> tuple[EpisodeTurn, ...]:
    """Return the steps of an episode, in order of arrival."""
    return tuple(
        EpisodeTurn(
            turn_id=turn["turn_id"],
            step=turn["step"],
            state=TurnState(turn["state"]),
            reason=None if turn["reason"] is None else DropReason(turn["reason"]),
            reward=turn["reward"],
            advantage=turn["advantage"],
        )
        for turn in db.execute(
            "SELECT turn_id, step, turn.state, turn.reason, reward, advantage FROM turn JOIN request USING (id)"
            " LEFT JOIN credit USING (id) WHERE of_episode = ? ORDER BY turn.id",
            (row,),
        )
    )


def _shared(turn: sqlite3.Row, new: Ids) -> int:
    """Return the number of leading messages that the request has in common with the turn's own and its reply."""
    told = (*unpack_ids(turn["messages"]), turn["message"])
    return next((at for at, (a, b) in enumerate(zip(told, new, strict=False)) if a != b), min(len(told), len(new)))


def _observation(db: sqlite3.Connection, pieces: Ids) -> list[int]:
    """Return the messages behind the last reply among the new ones, without system messages."""
    roles = [message.role for message in blobs.get_messages(db, pieces)]
    start = max((at for at, role in enumerate(roles) if role == "assistant"), default=-1) + 1
    return [
        piece for piece, role in zip(pieces[start:], roles[start:], strict=True) if role not in ("system", "developer")
    ]

"""Pair a request with the reply that it answers: by history, in memory, without I/O.

An open turn is found by its key: scope, reply, the message before the reply. A request answers the turn whose key is
directly before its first new message. All new messages are the next state of that turn. The rules:

* Turns of different scopes never pair. Without a session id the whole history must match too, because all such chats
  share one scope.
* The first continuation wins: a turn pairs once. Later continuations of the same reply (branches) pair with no turn.
* A retry leaves the older turn open. When a request continues one of them, the other turns with the same history are
  superseded. Without a session id they expire instead: two users who open with the same words made no retry.
* Background exchanges in the client's history (heartbeats) are skipped: they are no next state, and hide no turn.

An open turn holds its ids and three digests, no messages. The caller keeps the ledger consistent with the pairing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from openclaw_rl.messages import Message
from openclaw_rl.sessions.conversation_key import canonical_text, conversation, digest, history_digest
from openclaw_rl.sessions.openclaw import is_background, is_summary, unmerged
from openclaw_rl.sessions.reactions import is_taken_back, reactions
from openclaw_rl.types import NextState, OpenTurn, Scope

_MAX_CUTS = 64
"""Line ends at which a merged reply is cut to find the recorded part; OpenClaw appends a few lines."""

_Bucket = tuple[Scope, str]


@dataclass(frozen=True, slots=True)
class Paired:
    """A turn that a request answered, and its next state."""

    turn_id: str
    next_state: NextState
    superseded: tuple[str, ...] = ()
    """Retries of the same turn, which this continuation passed over."""


class Pairing:
    """Open turns. No method awaits, so on one event loop no two callers can take the same turn."""

    def __init__(self, max_open_turns: int) -> None:
        self._max_open_turns = max_open_turns
        self._turns: dict[str, OpenTurn] = {}  # oldest first
        self._buckets: dict[_Bucket, list[OpenTurn]] = {}  # oldest first; a handful in each
        """The turns of a session; without a session id, the turns that answer one history."""

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: OpenTurn) -> list[str]:
        """Add an open turn. Return the ids of the oldest turns, which were removed for it."""
        if turn.turn_id in self._turns:
            return []
        self._turns[turn.turn_id] = turn
        self._buckets.setdefault(_bucket(turn.scope, turn.key.history_hash), []).append(turn)
        return self.remove(list(islice(self._turns, max(0, len(self._turns) - self._max_open_turns))))

    def observe(self, scope: Scope, messages: Sequence[Message]) -> Paired | None:
        """Remove and return the turn that a new main request answers, or None."""
        turn, new = self._find(scope, conversation(messages))
        if turn is None or not new:  # without a new message the client asks to continue the reply: no judgement of it
            return None
        siblings = self._buckets[_bucket(scope, turn.key.history_hash)] if scope.session_id is not None else []
        superseded = [
            other.turn_id for other in siblings if other is not turn and other.key.history_hash == turn.key.history_hash
        ]
        self.remove([turn.turn_id, *superseded])
        # A user reacts to a text, never to a tool call; but the client repeats the reaction behind tool results.
        seen = reactions(messages) if any(message.role == "user" for message in new) else ()
        return Paired(turn.turn_id, NextState(tuple(new), seen), tuple(superseded))

    def observe_side(self, scope: Scope, messages: Sequence[Message]) -> Paired | None:
        """Remove and return the turn whose reply the user reacted to, if a background request reports a reaction."""
        seen = reactions(messages)
        if all(is_taken_back(reaction) for reaction in seen):
            return None
        turn, _ = self._find(scope, conversation(messages))
        if turn is None:
            return None
        self.remove([turn.turn_id])
        return Paired(turn.turn_id, NextState((), seen))

    def remove(self, turn_ids: Iterable[str]) -> list[str]:
        """Remove turns; return the ids that were open."""
        gone = []
        for turn_id in turn_ids:
            if (turn := self._turns.pop(turn_id, None)) is None:
                continue
            gone.append(turn_id)
            bucket = _bucket(turn.scope, turn.key.history_hash)
            self._buckets[bucket].remove(turn)
            if not self._buckets[bucket]:
                del self._buckets[bucket]
        return gone

    def close(self, scope: Scope) -> list[str]:
        """Remove all open turns of a session that is over; return their ids. Without a session id: no turn."""
        turns = [] if scope.session_id is None else self._buckets.get(_bucket(scope, ""), [])
        return self.remove([turn.turn_id for turn in turns])

    def expire(self, older_than: float) -> list[str]:
        """Remove turns finished before `older_than`; return their ids."""
        return self.remove([turn.turn_id for turn in self._turns.values() if turn.finished_at < older_than])

    def _find(self, scope: Scope, history: Sequence[Message]) -> tuple[OpenTurn | None, list[Message]]:
        """Return the last turn of the history, and the messages after it; background exchanges are skipped."""
        end = len(history)
        new: list[Message] = []
        while (last := _last_reply(history, end)) is not None:
            new = [message for message in history[last + 1 : end] if not is_background(message)] + new
            if turn := self._match(scope, history, last):
                return turn, new
            asked = next((k for k in range(last, -1, -1) if history[k].role == "user"), None)
            if asked is None or not is_background(history[asked]):
                break
            end = asked
        return None, []

    def _match(self, scope: Scope, history: Sequence[Message], last: int) -> OpenTurn | None:
        """Return the open turn whose reply is the message at `last`."""
        whole = history_digest(history[:last]) if scope.session_id is None else ""
        turns = self._buckets.get(_bucket(scope, whole), [])
        if not turns:
            return None
        hashes: Iterable[str]
        if scope.session_id is not None and (last == 0 or is_summary(history[last - 1])):
            hashes = [digest(history[last])]  # a compaction replaced the messages before: only the reply can match
        else:
            before = _before_hashes(history, last)
            turns = [turn for turn in turns if turn.key.before_hash in before]
            hashes = _reply_hashes(history[last]) if turns else ()
        for reply_hash in hashes:
            if candidates := [turn for turn in turns if turn.key.reply_hash == reply_hash]:
                return _choose(candidates, history[:last])
        return None


def _choose(candidates: list[OpenTurn], history: Sequence[Message]) -> OpenTurn:
    """Return the best of the turns with the same reply to the same message.

    A turn with this very history is best, else the newest one; of turns with equal keys the oldest.
    """
    # Equal keys are chats that cannot be distinguished: the oldest turn gets the first answer.
    if len(candidates) > 1:
        whole = history_digest(history)
        candidates = [turn for turn in candidates if turn.key.history_hash == whole] or candidates
    return next(turn for turn in candidates if turn.key == candidates[-1].key)


def _bucket(scope: Scope, history_hash: str) -> _Bucket:
    return scope, history_hash if scope.session_id is None else ""


def _last_reply(history: Sequence[Message], end: int) -> int | None:
    return next((k for k in range(end - 1, -1, -1) if history[k].role == "assistant"), None)


def _before_hashes(history: Sequence[Message], last: int) -> set[str]:
    """Return the possible digests of the message before a reply: its own, or of the last messages merged into it."""
    if last == 0:
        return {""}
    before = history[last - 1]
    return {digest(before)} | {digest(before, text) for text in unmerged(before)}


def _reply_hashes(reply: Message) -> Iterable[str]:
    """Yield the possible digests of a turn's reply: its own, then of the part before text that the client appended."""
    yield digest(reply)
    text = "" if reply.tool_calls else canonical_text(reply)
    for _ in range(_MAX_CUTS):
        text = text.rpartition("\n")[0].rstrip()
        if not text:
            return
        yield digest(reply, text)

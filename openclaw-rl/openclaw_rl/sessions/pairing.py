"""Pair a request with the reply that it answers: by history, in memory, without I/O.

A request answers the turn whose reply is directly before its first new message. All new messages are the next state of
that turn. The reply must be equal to the eye, thoughts aside; text that the client appended is cut. What stands before
the reply is the second evidence, from strong to weak:

* `WHOLE`: the whole history before the reply is equal.
* `BEFORE`: the message before the reply is equal. Without a session id all replies before must agree too.
* `DECORATED`: the user's message before the reply differs by a decoration alone, and all replies before agree.
* `RENUMBERED`: as `DECORATED`, and the decoration stands in both messages, with another time or count in it.
* `ALONE`: only the reply is equal, and no other turn has the same one. In a session all replies before must agree;
  without a session id the history must begin with this reply, and the reply must be long.

"Agree" means: the request has the same replies before, in the same order, or the last ones of them, because clients cut
histories at their start. Without a session id a cut history needs more: an equal reply before, or a text that is not
short. The strongest evidence decides. Of turns with equal evidence the newest question of a session pairs. Without a
session id such turns, if they differ, pair with no request: a false pair is worse than a missing one. More rules:

* Turns of different scopes or groups never pair. Without a session id all chats of a user share one scope.
* The first continuation wins: a turn pairs once. Ended turns stay known for a while, so that a later continuation (a
  branch) pairs with no turn, and never with a similar one.
* A retry leaves the older turn open. When a request continues one of them, the other turns with the same history are
  superseded. Without a session id they expire instead: two users who open with the same words made no retry.
* Background exchanges in the client's history (heartbeats) are skipped: they are no next state, and hide no turn.

An open turn holds its ids and digests, no messages. The caller keeps the ledger consistent with the pairing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import islice

from openclaw_rl.messages import Message
from openclaw_rl.sessions.conversation_key import (
    History,
    Known,
    canonical_text,
    conversation,
    digest,
    grouped,
    is_decorated,
    is_renumbered,
    turn_key,
)
from openclaw_rl.sessions.openclaw import is_background, is_summary, unmerged
from openclaw_rl.sessions.reactions import is_taken_back, reactions
from openclaw_rl.sessions.thoughts import without_quote
from openclaw_rl.types import NextState, OpenTurn, Place, Request, Scope, TurnKey

_MAX_CUTS = 64
"""Line ends at which a merged reply is cut to find the recorded part; OpenClaw appends a few lines."""
_MOST_ENDED = 2000
"""Ended turns that stay known; older ones are forgotten."""
_MOST_COMPARED = 256
"""Newest turns with one reply whose weak evidence is compared; a bound of time, for chats that reply "ok"."""
_LONG_TEXT, _LONG_REPLY = 16, 40
"""Characters of message and reply that are evidence without any reply before them, and of a reply on its own."""


class Evidence(IntEnum):
    """Strength of the evidence besides the reply itself."""

    ALONE = 1
    RENUMBERED = 2
    DECORATED = 3
    BEFORE = 4
    WHOLE = 5


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
        self._ended: dict[str, OpenTurn] = {}  # oldest first
        self._index: dict[tuple[str, Scope, str], dict[str, OpenTurn]] = {}
        """Open and ended turns by reply and by history; oldest first."""
        self._known = Known()

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def turn_ids(self) -> list[str]:
        """The turns that are known, open and ended."""
        return [*self._turns, *self._ended]

    def key(self, request: Request, reply: Message) -> TurnKey:
        """Return the key of the reply to this request."""
        return turn_key(request.messages, reply, request.group, self._known)

    def add(self, turn: OpenTurn) -> list[str]:
        """Add an open turn. Return the ids of the oldest turns, which were removed for it."""
        if turn.turn_id in self._turns:
            return []
        self._turns[turn.turn_id] = turn
        self._know(turn)
        return self.remove(list(islice(self._turns, max(0, len(self._turns) - self._max_open_turns))))

    def add_ended(self, turn: OpenTurn) -> None:
        """Add a turn that ended before a restart: it takes no answer, and what continues it pairs with no other."""
        self._ended[turn.turn_id] = turn
        self._know(turn)

    def _know(self, turn: OpenTurn) -> None:
        for key in _keys(turn):
            self._index.setdefault(key, {})[turn.turn_id] = turn

    def observe(self, scope: Scope, messages: Sequence[Message], group: str | None = None) -> Paired | None:
        """Remove and return the turn that a new main request answers, or None. `group`: `Request.group`."""
        turn, new = self._find(scope, conversation(messages), group)
        if turn is None or not new:  # without a new message the client asks to continue the reply: no judgement of it
            return None
        superseded = self._retries(turn) if scope.session_id is not None else []
        self.remove([turn.turn_id, *superseded])
        # A user reacts to a text, never to a tool call; but the client repeats the reaction behind tool results.
        seen = reactions(messages) if any(message.role == "user" for message in new) else ()
        return Paired(turn.turn_id, NextState(tuple(new), seen), tuple(superseded))

    def observe_side(self, scope: Scope, messages: Sequence[Message], group: str | None = None) -> Paired | None:
        """Remove and return the turn whose reply the user reacted to, if a background request reports a reaction."""
        seen = reactions(messages)
        if all(is_taken_back(reaction) for reaction in seen):
            return None
        turn, _ = self._find(scope, conversation(messages), group)
        if turn is None:
            return None
        self.remove([turn.turn_id])
        return Paired(turn.turn_id, NextState((), seen))

    def last_turn(self, scope: Scope, messages: Sequence[Message], group: str | None = None) -> OpenTurn | None:
        """Return the open turn whose reply is the last one of these messages, or None. It stays open."""
        turn, _ = self._find(scope, conversation(messages), group)
        return turn

    def remove(self, turn_ids: Iterable[str]) -> list[str]:
        """Remove turns; return the ids that were open. They stay known as ended."""
        gone = [turn_id for turn_id in turn_ids if turn_id in self._turns]
        for turn_id in gone:
            self._ended[turn_id] = self._turns.pop(turn_id)
        self.forget(list(islice(self._ended, max(0, len(self._ended) - _MOST_ENDED))))
        return gone

    def forget(self, turn_ids: Iterable[str]) -> None:
        """Remove turns, ended ones too, with their digests; later requests pair as if they had never been."""
        for turn_id in turn_ids:
            turn = self._turns.pop(turn_id, None) or self._ended.pop(turn_id, None)
            for key in () if turn is None else _keys(turn):
                del self._index[key][turn_id]
                if not self._index[key]:
                    del self._index[key]

    def forget_words(self) -> None:
        """Drop all digests that belong to no turn here."""
        self._known.clear()

    def close(self, scope: Scope) -> list[str]:
        """Remove all open turns of a session that is over; return their ids. Without a session id: no turn."""
        if scope.session_id is None:
            return []
        return self.remove([turn.turn_id for turn in self._turns.values() if turn.scope == scope])

    def expire(self, older_than: float) -> list[str]:
        """Remove turns finished before `older_than`; return their ids."""
        return self.remove([turn.turn_id for turn in self._turns.values() if turn.finished_at < older_than])

    def _retries(self, turn: OpenTurn) -> list[str]:
        """Return the other open turns of the session with the same history."""
        same = self._index[("history", turn.scope, turn.key.history_hash)]
        return [turn_id for turn_id in same if turn_id in self._turns and turn_id != turn.turn_id]

    def _find(
        self, scope: Scope, history: Sequence[Message], group: str | None
    ) -> tuple[OpenTurn | None, list[Message]]:
        """Return the last turn of the history, and the messages after it; background exchanges are skipped."""
        end = len(history)
        new: list[Message] = []
        while (last := _last_reply(history, end)) is not None:
            new = [message for message in history[last + 1 : end] if not is_background(message)] + new
            if turn := self._match(scope, history, last, group):
                return turn, new
            asked = next((k for k in range(last, -1, -1) if history[k].role == "user"), None)
            if asked is None or not is_background(history[asked]):
                break
            end = asked
        return None, []

    def _match(self, scope: Scope, history: Sequence[Message], last: int, group: str | None) -> OpenTurn | None:
        """Return the open turn whose reply is the message at `last`."""
        request: _Before | None = None
        for reply_hash, is_cut in _reply_hashes(history[last]):
            turns = self._index.get(("reply", scope, grouped(reply_hash, group)))
            if not turns:
                continue
            request = request or _Before(scope, history[:last], history[last], self._known)
            if is_cut and request.is_compacted:
                return None
            # The index of histories holds the strongest evidence, so only the newest of many turns are compared.
            whole = self._index.get(("history", scope, request.whole), {})
            found = [(Evidence.WHOLE, turn) for turn in whole.values() if turn.turn_id in turns]
            if not found:
                newest = list(islice(reversed(turns.values()), _MOST_COMPARED))[::-1]
                found = [
                    (seen, turn)
                    for turn in newest
                    # An ended turn speaks for a branch only where the request could continue it.
                    if (turn.turn_id in self._turns or request.agrees(turn.key.place))
                    and (seen := request.evidence(turn, is_cut=is_cut))
                ]
            if found:
                best = max(seen for seen, _ in found)
                return self._choose([turn for seen, turn in found if seen == best], best, request)
        return None

    def _choose(self, found: Sequence[OpenTurn], evidence: Evidence, request: "_Before") -> OpenTurn | None:
        """Return the best of the turns with equal evidence; None for a branch, and if it cannot be told."""
        turns = [turn for turn in found if turn.turn_id in self._turns]
        if not turns:
            return None
        first, newest = turns[0].key, turns[-1].key
        if evidence is Evidence.ALONE:
            is_told = len(turns) == 1 and (request.is_session or len(found) == 1)
            return turns[0] if is_told else None
        if request.is_session:  # a turn with this very history comes first; else the newest question, its oldest reply
            return next(turn for turn in turns if turn.key.history_hash == newest.history_hash)
        # Turns that were asked alike are chats that cannot be told apart: the oldest turn gets the first answer.
        is_told = evidence is Evidence.WHOLE or all(
            turn.key.history_hash == first.history_hash or _is_same_question(turn.key.place, first.place)
            for turn in turns
        )
        return turns[0] if is_told else None


class _Before:
    """The messages of a request before the reply that it answers, and their evidence for a turn."""

    def __init__(self, scope: Scope, history: Sequence[Message], reply: Message, known: Known) -> None:
        digests = History.of(history, known)
        self._history, self._reply = history, reply
        self.is_session = scope.session_id is not None
        self.whole, self._before, self._place = digests.whole, digests.before, digests.place
        self.is_compacted = self.is_session and (not history or is_summary(history[-1]))
        """The messages before were replaced or cut off within a session: only the reply can match."""

    # Most requests repeat the whole history of their turn, and need none of these.

    @cached_property
    def _hashes(self) -> frozenset[str]:
        """Digests of the message before the reply, and of the last messages that a client merged into it."""
        merged = unmerged(self._history[-1]) if self._history else ()
        return frozenset((self._before, *(digest(self._history[-1], text) for text in merged)))

    @cached_property
    def _has_summary(self) -> bool:
        return any(map(is_summary, self._history))

    @cached_property
    def _reply_chars(self) -> int:
        return len(canonical_text(self._reply))

    @cached_property
    def _chars(self) -> int:
        return self._reply_chars + (len(canonical_text(self._history[-1])) if self._history else 0)

    def evidence(self, turn: OpenTurn, *, is_cut: bool) -> Evidence | None:
        """Return the evidence for a turn with this reply but another history; `is_cut`: with a part of this reply."""
        agrees = self.agrees(turn.key.place)
        if self.is_session:
            if self.is_compacted or turn.key.before_hash in self._hashes:
                return Evidence.BEFORE
        elif self._before and turn.key.before_hash in self._hashes and agrees:
            return Evidence.BEFORE
        if is_cut or not (self._reply_chars or self._reply.tool_calls):
            return None
        if not self._before:
            return Evidence.ALONE if self._reply_chars >= _LONG_REPLY else None
        is_evident = self.is_session or self._is_long or self._place.words == turn.key.place.words
        if agrees and is_evident and is_decorated(self._place, turn.key.place):
            return Evidence.DECORATED
        if agrees and self._place.depth == turn.key.place.depth and is_renumbered(self._place, turn.key.place):
            return Evidence.RENUMBERED
        return Evidence.ALONE if self.is_session and agrees else None

    def agrees(self, turn: Place) -> bool:
        """Return True if the replies before are those of the turn, or the last ones of them."""
        mine = self._place
        size = min(len(mine.replies), len(turn.replies))
        if not 0 <= mine.depth <= turn.depth or (size and mine.replies[-size:] != turn.replies[-size:]):
            return False
        if self.is_session:
            return True
        # A summary stands for messages that are unknown: without a session id they must all be known.
        return not self._has_summary and (mine.depth == turn.depth or self._is_long)

    @property
    def _is_long(self) -> bool:
        return self._place.depth > 0 or self._chars >= _LONG_TEXT


def _is_same_question(one: Place, other: Place) -> bool:
    return one.depth == other.depth >= 0 and one.replies == other.replies and one.words == other.words


def _keys(turn: OpenTurn) -> Iterator[tuple[str, Scope, str]]:
    yield "reply", turn.scope, turn.key.reply_hash
    yield "history", turn.scope, turn.key.history_hash


def _last_reply(history: Sequence[Message], end: int) -> int | None:
    return next((k for k in range(end - 1, -1, -1) if history[k].role == "assistant"), None)


def _reply_hashes(reply: Message) -> Iterator[tuple[str, bool]]:
    """Yield the possible digests of a turn's reply, and whether a part was cut off.

    First its own and that of the text behind a quoted block of thoughts, then of the part before text that the client
    appended.
    """
    yield digest(reply), False
    text = canonical_text(reply)
    behind = without_quote(text)
    if behind is not None:
        yield digest(reply, behind), False
    for whole in () if reply.tool_calls else (text, behind or ""):
        text = whole
        for _ in range(_MAX_CUTS):
            text = text.rpartition("\n")[0].rstrip()
            if not text:
                break
            yield digest(reply, text), True

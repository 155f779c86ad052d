"""Commands of a user in a chat: a message of one line that is only `/rl good`, `/rl bad why`, `/rl undo` …

`command_of` reads one. `without_commands` removes the commands of a history, each with its answer: the model and the
pairing never see them. Words of the client around the line (a time stamp, a reminder) are no part of the message.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from openclaw_rl.messages import Message
from openclaw_rl.sessions.conversation_key import History, conversation, digest, own_words
from openclaw_rl.types import OpenTurn

_LINE = re.compile(r"/rl(?:[ \t]+(?P<verb>\S+)(?:[ \t]+(?P<rest>[^\n]+))?)?\Z", re.IGNORECASE)
_LONGEST = 20_000
"""Characters of a message, with all that a client puts around it, that may be a command."""
GOOD, BAD, UNDO, STATUS, WISHES, HELP = "good", "bad", "undo", "status", "wishes", "help"
_ALONE = frozenset({GOOD, UNDO, STATUS, WISHES, HELP})
"""Verbs without words behind them."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    verb: str
    """`help` for a line that is no command of ours: its user meant one, and it is no message to the model."""
    why: str | None = None
    """Words behind `bad`: the user's wish."""


@dataclass(frozen=True, slots=True)
class CommandedChat:
    """The chat that a command stands in."""

    session_id: str | None
    turn: OpenTurn | None
    """The open turn whose reply was read last; None if it is not open, or not known."""
    reply_hash: str | None
    """Digest of the last reply that the chat shows; None without one."""
    place: str
    """Digest of all messages, all commands and their answers included: a request that is sent again has the same."""

    @classmethod
    def of(cls, session_id: str | None, turn: OpenTurn | None, messages: Sequence[Message]) -> Self:
        """messages: all of the chat; the last one is the command."""
        shown = conversation(without_commands(messages[:-1]))
        replies = [message for message in shown if message.role == "assistant"]
        place = History.of(conversation(messages)).whole
        return cls(session_id, turn, digest(replies[-1]) if replies else None, place)

    def shows(self, reply: Message) -> bool:
        """Return True if this reply is the last one of the chat."""
        return digest(reply) == self.reply_hash


def command_of(message: Message) -> Command | None:
    """Return the command that the message is, or None."""
    if message.role != "user":
        return None
    text = message.text()
    if len(text) > _LONGEST or "/rl" not in text.lower():
        return None
    line = _LINE.match(own_words(message).strip())
    if line is None:
        return None
    verb, rest = (line["verb"] or HELP).lower(), line["rest"]
    if verb == BAD:
        return Command(BAD, rest.strip() if rest else None)
    return Command(verb if verb in _ALONE and not rest else HELP)


def without_commands(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages without commands and the answers to them; the same object if there is none."""
    if not any(command_of(message) for message in messages):
        return messages
    kept: list[Message] = []
    is_answered = False
    for message in messages:
        if command_of(message) is not None:
            is_answered = True
        elif not (is_answered and message.role == "assistant"):
            is_answered = False
            kept.append(message)
    return kept

"""Canonical form and digest of a message: a client sends our replies back, but not byte for byte.

Canonical are the role, the trimmed text, and each tool call's name with its arguments as canonical JSON. A user's text
is without the client's wrapping, a reply's without time stamps before it. List content equals the string that it
spells. Ids are left out, because clients rewrite them. Reasoning is left out, because its whitespace changes on the way
back and many clients drop it. Digests are hex, 128 bits.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from openclaw_rl.messages import Message
from openclaw_rl.sessions.openclaw import is_ephemeral, strip_wrapping, unstamped
from openclaw_rl.types import TurnKey

_DIGEST_SIZE = 16
_EXACT = 2**53
"""Integers beyond it are not exact in JavaScript, so a client that re-serialises arguments changes them."""


def conversation(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without system prompts, which change within a session, and without ephemeral messages."""
    return [
        message for message in messages if message.role not in ("system", "developer") and not is_ephemeral(message)
    ]


def canonical_text(message: Message) -> str:
    """Return the text of the message that pairing compares."""
    text = message.text()
    match message.role:
        case "user":
            return strip_wrapping(text)
        case "assistant":
            return unstamped(text)
        case _:
            return text.strip()


def digest(message: Message, text: str | None = None) -> str:
    """Return the digest of one message; `text` replaces its canonical text."""
    text = canonical_text(message) if text is None else text
    fields = [message.role, text]
    for call in message.tool_calls or ():
        fields += (call.function.name, canonical_arguments(call.function.arguments))
    return _digest(fields)


def history_digest(messages: Iterable[Message]) -> str:
    """Return the digest of a whole conversation."""
    return _digest([digest(message) for message in messages])


def turn_key(messages: Sequence[Message], reply: Message) -> TurnKey:
    """Return the key of `reply` in its conversation; `messages` are the request's."""
    history = conversation(messages)
    digests = [digest(message) for message in history]
    return TurnKey(reply_hash=digest(reply), before_hash=digests[-1] if digests else "", history_hash=_digest(digests))


def canonical_arguments(arguments: str | dict[str, Any]) -> str:
    """Return tool arguments as JSON with sorted keys; a string that is not JSON stays as it is."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", parse_int=_number, parse_float=_number)
        except (ValueError, RecursionError):
            return str(arguments).strip()
    else:
        arguments = json.loads(json.dumps(arguments), parse_int=_number, parse_float=_number)
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"))


def _number(digits: str) -> int | float:
    """Return the number of a JSON literal; 1, 1.0 and 1e0 are equal, as in JavaScript."""
    value = float(digits)
    return int(value) if value.is_integer() and abs(value) <= _EXACT else value


def _digest(fields: Sequence[str]) -> str:
    state = blake2b(digest_size=_DIGEST_SIZE)
    for field in fields:
        data = field.encode("utf-8", "surrogatepass")
        state.update(b"%d:" % len(data))
        state.update(data)
    return state.hexdigest()

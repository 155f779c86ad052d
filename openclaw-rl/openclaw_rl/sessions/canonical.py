"""When two messages are the same: a client sends back what it was sent, but not byte for byte.

Canonical is the role, the trimmed text (a user's without the client's wrapping, a reply's less stamps before it), and
each tool call's name with its arguments as canonical JSON. No ids (clients rewrite them), no reasoning (its whitespace
changes on the way back, and many clients drop it), and list content equals the string it spells. Digests are hex, 128
bits.
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
    """The messages that stay: less system prompts (they change within a session) and ephemeral ones."""
    return [
        message for message in messages if message.role not in ("system", "developer") and not is_ephemeral(message)
    ]


def canonical_text(message: Message) -> str:
    text = message.text()
    match message.role:
        case "user":
            return strip_wrapping(text)
        case "assistant":
            return unstamped(text)
        case _:
            return text.strip()


def digest(message: Message, text: str | None = None) -> str:
    """Of one message; `text` stands for its canonical text when given."""
    text = canonical_text(message) if text is None else text
    fields = [message.role, text]
    for call in message.tool_calls or ():
        fields += (call.function.name, canonical_arguments(call.function.arguments))
    return _digest(fields)


def history_digest(messages: Iterable[Message]) -> str:
    """Of a whole conversation."""
    return _digest([digest(message) for message in messages])


def turn_key(messages: Sequence[Message], reply: Message) -> TurnKey:
    """Where `reply` to a request with these messages stands in its conversation."""
    history = conversation(messages)
    digests = [digest(message) for message in history]
    return TurnKey(reply_hash=digest(reply), before_hash=digests[-1] if digests else "", history_hash=_digest(digests))


def canonical_arguments(arguments: str | dict[str, Any]) -> str:
    """Tool arguments as JSON with sorted keys; a string that is not JSON stays as it is."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", parse_int=_number, parse_float=_number)
        except (ValueError, RecursionError):
            return str(arguments).strip()
    else:
        arguments = json.loads(json.dumps(arguments), parse_int=_number, parse_float=_number)
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"))


def _number(digits: str) -> int | float:
    """1, 1.0 and 1e0 are one number, as in JavaScript."""
    value = float(digits)
    return int(value) if value.is_integer() and abs(value) <= _EXACT else value


def _digest(fields: Sequence[str]) -> str:
    state = blake2b(digest_size=_DIGEST_SIZE)
    for field in fields:
        data = field.encode("utf-8", "surrogatepass")
        state.update(b"%d:" % len(data))
        state.update(data)
    return state.hexdigest()

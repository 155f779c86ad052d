"""The prompt that the teacher reads: the turn's own prompt with the hint in its last user message."""

from collections.abc import Sequence
from typing import Literal

from openclaw_rl.judge.prompt import is_request
from openclaw_rl.messages import ContentPart, Message
from openclaw_rl.sessions.openclaw import is_ephemeral
from openclaw_rl.types.pictures import PICTURE_PARTS

HintPlace = Literal["behind", "between"]
"""`behind`: the hint ends the message. `between`: the message is repeated behind the hint. A small model answers what
it read last: behind a bare "Shorter, please." it excuses itself, and no longer answers the request."""
REPEATED_CHARS = 2000
"""Longest text of a message that is repeated; a longer one has the hint behind it."""


def hinted(messages: Sequence[Message], hint: str, place: HintPlace = "behind") -> tuple[Message, ...] | None:
    """Return the conversation with the hint in the last message that a user wrote; None without one.

    All other messages stay unchanged, also tool results and the client's own messages behind it. With an empty hint the
    conversation is unchanged.
    """
    at = _last_request(messages)
    return None if at is None else (*messages[:at], _with(messages[at], hint, place), *messages[at + 1 :])


def asked_instead(messages: Sequence[Message], request: str) -> tuple[Message, ...] | None:
    """Return the conversation with other words in the place of the last message that a user wrote; None without one.

    The message keeps its pictures, in front of the words.
    """
    at = _last_request(messages)
    if at is None:
        return None
    said = messages[at].content
    kept = [part for part in said if part.type in PICTURE_PARTS] if isinstance(said, list) else []
    content = [*kept, ContentPart(type="text", text=request)] if kept else request
    return (*messages[:at], messages[at].model_copy(update={"content": content}), *messages[at + 1 :])


def _last_request(messages: Sequence[Message]) -> int | None:
    places = [k for k, message in enumerate(messages) if is_request(message) and not is_ephemeral(message)]
    return places[-1] if places else None


def _with(message: Message, hint: str, place: HintPlace) -> Message:
    if not hint:
        return message
    addition, text = f"\n\n(Keep in mind: {hint})", message.text()
    if place == "between" and text.strip() and len(text) <= REPEATED_CHARS:
        addition += f"\n\n{text}"
    if not isinstance(message.content, list):
        return message.model_copy(update={"content": text + addition})
    parts = list(message.content)
    last = max((k for k, part in enumerate(parts) if part.type == "text"), default=None)
    if last is None:
        parts.append(ContentPart(type="text", text=addition.lstrip()))
    else:
        parts[last] = parts[last].model_copy(update={"text": (parts[last].text or "") + addition})
    return message.model_copy(update={"content": parts})

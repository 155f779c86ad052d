"""Chat messages as clients send them, shared by the proxy, the sessions and the judge.

The models keep unknown fields, because a proxy passes them on. Messages are frozen: no code edits one.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, field_validator

DEEPEST = 100
"""Levels of objects and lists in a value that is rendered and recorded. Readers of JSON stop at 200, writers at 254."""


def is_deeper(value: object, levels: int) -> bool:
    """Return True if objects and lists stand in each other more than `levels` times."""
    # Level by level: a walk that calls itself would fail of the depth that it looks for.
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        inner = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return False
    return bool(level)


_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def whole_characters(text: str) -> str:
    """Return the text with U+FFFD for each half of a character.

    JSON can hold one: a model's answer that ends inside an emoji. No file, log or HTTP body can.
    """
    return text if text.isascii() else _HALF_CHARACTER.sub("\ufffd", text)


class ContentPart(BaseModel):
    """One part of a list content; only `type: text` reaches a text model."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: str
    text: str | None = None

    @property
    def is_thought(self) -> bool:
        """True for a part of a reply's reasoning, as Anthropic's dialect and some gateways send it back."""
        return self.type in ("thinking", "reasoning", "redacted_thinking")


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    name: str
    arguments: str | dict[str, Any] = "{}"
    """A JSON string on OpenAI's wire; some clients send the object itself. Other values are kept as JSON."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        if value is None:
            return "{}"
        return json.dumps(value) if isinstance(value, list | int | float) else value

    def as_object(self) -> dict[str, Any]:
        """Return the arguments as an object, as templates print them.

        A text that is no JSON object, such as a call that the token limit cut, is the only value of one, and so is one
        of more than `DEEPEST` levels: a history with such a call can go on.
        """
        value: Any = self.arguments
        for _ in range(2):  # some clients encode twice
            if isinstance(value, str):
                value = _parsed(value)
        return value if isinstance(value, dict) else {"arguments": value}


def _parsed(text: str) -> Any:
    """Return the value of a JSON text. One that is no JSON, or deep, stays; an empty one is an empty object."""
    if not text.strip():
        return {}
    try:
        value = orjson.loads(text)
    except ValueError:
        try:
            value = json.loads(text, strict=False)  # line ends in strings, NaN
            json.dumps(value, ensure_ascii=False).encode()  # half a character has no bytes
        except (ValueError, RecursionError):
            return text
    return text if is_deeper(value, DEEPEST) else value


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    id: str | None = None
    type: str = "function"
    function: FunctionCall


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow", frozen=True)
    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def text(self) -> str:
        """Return the text of the message; one newline joins several text parts."""
        if isinstance(self.content, list):
            return "\n".join(part.text or "" for part in self.content if part.type == "text")
        return self.content or ""

    def thoughts(self) -> str:
        """Return the reasoning that stands in parts of the content; empty without such parts."""
        parts = self.content if isinstance(self.content, list) else ()
        found = [part.text or (part.model_extra or {}).get(part.type) for part in parts if part.is_thought]
        return "\n".join(text for text in found if isinstance(text, str))


def in_call_order(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the messages, with the results of parallel calls in the order of their calls.

    Clients send results as they arrive, and templates print them without the ids. Results whose calls are unknown, or
    have no ids of their own, keep their places.
    """
    order = list(range(len(messages)))
    at = 0
    while at < len(messages):
        calls: list[str | None] = []
        while at < len(messages) and messages[at].role == "assistant":
            calls += [call.id for call in messages[at].tool_calls or ()]
            at += 1
        end = at
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        if end - at > 1 and calls and None not in calls and len(set(calls)) == len(calls):
            places = [k for k in range(at, end) if messages[k].tool_call_id in calls]
            sorted_places = sorted(places, key=lambda k: calls.index(messages[k].tool_call_id))
            for place, k in zip(places, sorted_places, strict=True):
                order[place] = k
        at = max(end, at + 1)
    return order

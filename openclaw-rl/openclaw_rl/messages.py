"""Chat messages as clients send them, shared by the proxy, the sessions and the judge.

The models keep unknown fields, because a proxy passes them on. Messages are frozen: no code edits one.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict


class ContentPart(BaseModel):
    """One part of a list content; only `type: text` reaches a text model."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: str
    text: str | None = None


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    name: str
    arguments: str | dict[str, Any] = "{}"
    """A JSON string on OpenAI's wire; some clients send the object itself."""


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

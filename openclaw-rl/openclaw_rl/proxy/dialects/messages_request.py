"""Anthropic's Messages, the request: blocks to messages, and its other fields to those of the chat form.

A tool's result is a block inside a user message; here it becomes a message of its own, as in the chat form. Only the
text beside it is what the user said. A thought goes back as it came; a signed or redacted one cannot be shown.

Claude Code puts a line that changes with each request at the front of its system prompt. It is removed: it would change
every prompt from its first token on.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openclaw_rl.errors import RequestError
from openclaw_rl.proxy.body import ParsedBody, check_depth, checked, explained, load
from openclaw_rl.types.pictures import PLACE

_SHARED = (
    "model", "stream", "temperature", "top_p", "top_k", "max_tokens", "chat_template_kwargs", "seed", "session_done",
)  # fmt: skip
"""Fields with the same meaning in both forms."""
_WITHOUT = ("mcp_servers", "container", "context_management")
"""Fields that are served without."""
_ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n+|\Z)")
"""The line that Claude Code (2.1.36 and later) puts first in its system prompt."""
_REMINDER = re.compile(r"(?:\s*<system-reminder>(?:(?!</system-reminder>).)*</system-reminder>)+\s*\Z", re.DOTALL)
"""A text of the client itself, which no user wrote: reminders, and no word between them."""
_SESSION = re.compile(r'(?:_session_|"session_id": ?")([\w-]{8,100})')
"""The session in `metadata.user_id`, in both forms that Claude Code has used."""


class ToolChoice(BaseModel):
    """Anthropic's `tool_choice`."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    """Anthropic's `thinking`; a budget is not held."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: Literal["enabled", "disabled", "adaptive"]


class InputMessage(BaseModel):
    """One message: a text, or blocks."""

    model_config = ConfigDict(extra="allow", frozen=True)
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountBody(BaseModel):
    """Fields of a request whose tokens are counted; null is the same as absent."""

    model_config = ConfigDict(extra="allow", frozen=True)
    messages: list[InputMessage] = Field(min_length=1)
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """Fields of the body that the server acts on; null is the same as absent."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: list[str] | None = Field(default=None, max_length=64)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    metadata: dict[str, Any] | None = None


Body = TypeVar("Body", bound=CountBody)


def read(data: bytes) -> ParsedBody:
    """Return the request of a body. Raises RequestError, and RecursionError for a body that is nested too deeply."""
    raw = load(data)
    body = _validated(MessagesBody, raw)
    chat, skipped = _chat(body, raw)
    chat |= {"stop": body.stop_sequences or None}
    user = (body.metadata or {}).get("user_id")
    if isinstance(user, str) and (session := _SESSION.search(user)):
        raw = {"session_id": session[1], **raw}
    if body.max_tokens == 1:
        raw = {"turn_type": "side", **raw}  # a client's probe of the connection
    return ParsedBody(checked(chat), raw, tuple(skipped))


def read_count(data: bytes) -> ParsedBody:
    """Return the request whose tokens are counted. Raises as `read`."""
    raw = load(data)
    chat, skipped = _chat(_validated(CountBody, raw), raw)
    return ParsedBody(checked(chat), raw, tuple(skipped))


def _validated(form: type[Body], raw: Mapping[str, Any]) -> Body:
    check_depth(raw, form.model_fields)
    try:
        return form.model_validate(raw)
    except ValidationError as error:
        raise explained(error, raw) from error


def _chat(body: CountBody, raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the chat form, and the names of what is left out."""
    tools, skipped = tools_of(body.tools or ())
    skipped += [name for name in _WITHOUT if raw.get(name)]
    chat: dict[str, Any] = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    chat |= {"messages": messages_of(body), "tools": tools or None, "response_format": _format(body.output_config)}
    if body.thinking is not None:
        chat["enable_thinking"] = body.thinking.type != "disabled"
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
        if body.tool_choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    return chat, skipped


def messages_of(body: CountBody) -> list[dict[str, Any]]:
    """Return the conversation as chat messages. Raises RequestError."""
    found = []
    if system := _system(body.system):
        found.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        at = f"messages[{index}].content"
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            found.append(_reply(message.content, at))
        else:
            found += _said(message.role, message.content, at)
    return found


def without_attribution(text: str) -> str:
    """Return a system prompt without Claude Code's attribution line."""
    return _ATTRIBUTION.sub("", text)


def _system(system: str | Sequence[Mapping[str, Any]] | None) -> str:
    if system is None or isinstance(system, str):
        return without_attribution(system or "")
    texts = [_text(block, f"system[{index}]") for index, block in enumerate(system)]
    return "\n".join(text for text in map(without_attribution, texts) if text)


def _reply(blocks: Sequence[Mapping[str, Any]], at: str) -> dict[str, Any]:
    """Return a reply of the model. Its texts belong together, as they were sampled."""
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                texts.append(_text(block, f"{at}[{index}]"))
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass
            case "tool_use":
                name, given = block.get("name"), block.get("input")
                if not isinstance(name, str) or not isinstance(given, dict | None):
                    raise RequestError(f"{at}[{index}]: a name, and an object as input", param=f"{at}[{index}]")
                function = {"name": name, "arguments": given or {}}
                calls.append({"id": _own_id(block.get("id")), "type": "function", "function": function})
            case kind:
                raise _unsupported(kind, f"{at}[{index}]")
    reply: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thought := "\n".join(filter(None, thoughts)):
        reply["reasoning_content"] = thought
    return reply | ({"tool_calls": calls} if calls else {})


def _said(role: str, blocks: Sequence[Mapping[str, Any]], at: str) -> list[dict[str, Any]]:
    """Return the messages of a user's blocks: each tool result, then what the user said."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            content = _result(block.get("content"), f"{at}[{index}].content")
            results.append({"role": "tool", "tool_call_id": _own_id(block.get("tool_use_id")), "content": content})
        else:
            parts.append(_part(block, f"{at}[{index}]"))
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if results and texts and len(texts) == len(parts) and all(map(_REMINDER.match, texts)):
        # The client's own words beside a result are part of it: they are no word of the user.
        before = results[-1]["content"]
        results[-1]["content"] = (
            "\n".join(filter(None, (before, *texts))) if isinstance(before, str) else [*before, *parts]
        )
        parts = []
    if parts or not results:
        results.append({"role": role, "content": texts[0] if len(texts) == len(parts) == 1 else parts})
    return results


def _result(content: Any, at: str) -> str | list[dict[str, Any]]:
    """Return the content of a tool's result: its text, or its parts where pictures are among them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{at}: a text, or a list of blocks, is needed", param=at)
    parts = [_part(block, f"{at}[{index}]") for index, block in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(block: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Return a block as a part of a chat message: a text, or a picture as a URL."""
    match block:
        case {"type": "image", "source": {"type": "base64", "media_type": str(media), "data": str(data)}}:
            return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}, PLACE: at}
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return {"type": "image_url", "image_url": {"url": url}, PLACE: at}
        case {"type": "image", "source": {"type": "file"}}:
            raise RequestError(f"{at}: a picture by name: this server keeps no files of clients", param=at)
        case _:
            return {"type": "text", "text": _text(block, at)}


def _text(block: Mapping[str, Any], at: str) -> str:
    """Return the text of a block. Raises RequestError for another block."""
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise RequestError(f"{at}.text: a text is needed", param=f"{at}.text")
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
    raise _unsupported(block.get("type"), at)


def _unsupported(kind: object, at: str) -> RequestError:
    if kind == "image":
        why = "only a user or a tool may show one, with a source of type base64"
        return RequestError(f"{at}: a picture: {why}", code="unsupported_content", param=at)
    return RequestError(
        f"{at}: this model reads text only; the block is of type {kind!r}", code="unsupported_content", param=at
    )


def _own_id(name: object) -> str | None:
    """Return the id under which a call was recorded; `toolu_` is its beginning in this dialect alone."""
    return f"call_{name[6:]}" if isinstance(name, str) and name.startswith("toolu_") else str(name) if name else None


def tools_of(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the client's tools in the chat form, and the names of the kinds of tools that are left out."""
    found: list[dict[str, Any]] = []
    skipped: list[str] = []
    for index, tool in enumerate(tools):
        if tool.get("type", "custom") not in ("custom", None):
            skipped.append(f"tools of type {str(tool['type'])[:60]}")
            continue
        if not isinstance(name := tool.get("name"), str):
            raise RequestError(f"tools[{index}].name is missing", param=f"tools[{index}]")
        function = {"name": name, "description": tool.get("description"), "parameters": tool.get("input_schema")}
        function["strict"] = tool.get("strict")
        given = {field: value for field, value in function.items() if value is not None}
        found.append({"type": "function", "function": given})
    return found, skipped


def _tool_choice(choice: ToolChoice) -> Any:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise RequestError("tool_choice.name: it is missing", param="tool_choice.name")
            return {"type": "function", "function": {"name": choice.name}}
        case _:
            return choice.type


def _format(config: Mapping[str, Any] | None) -> Any:
    """Return `output_config.format` as `response_format`. Raises RequestError."""
    match (config or {}).get("format"):
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
        case _:
            raise RequestError("output_config.format: json_schema with a schema", param="output_config.format")

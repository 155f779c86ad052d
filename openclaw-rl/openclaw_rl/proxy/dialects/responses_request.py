"""OpenAI's Responses, the request: items to messages, and its other fields to those of the chat form.

The items of one reply (thought, text, calls) become one message, as they were recorded. System and developer messages
at the start become one, because many templates take only one. Tools of other types than functions are served without;
an item or a part that cannot be shown to the model is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openclaw_rl.errors import RequestError
from openclaw_rl.proxy.body import ParsedBody, check_depth, checked, explained, load
from openclaw_rl.types.pictures import PLACE

_SHARED = (
    "model", "stream", "parallel_tool_calls", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "seed", "stop", "logit_bias", "ignore_eos", "chat_template_kwargs",
    "enable_thinking", "session_done",
)  # fmt: skip
"""Fields with the same meaning in both forms."""
_WITHOUT = ("max_tool_calls",)
"""Fields that are served without."""
_STATELESS = "this server keeps no responses for a later request; send the whole conversation as input"
_SYSTEM = ("system", "developer")
_LOG_PROBS = "message.output_text.logprobs"


class Reasoning(BaseModel):
    """Wishes for the thought."""

    model_config = ConfigDict(extra="allow", frozen=True)
    effort: str | None = None
    summary: str | None = None


class TextForm(BaseModel):
    """Form of the text."""

    model_config = ConfigDict(extra="allow", frozen=True)
    format: dict[str, Any] | None = None


class ResponsesBody(BaseModel):
    """Fields of the body that the server acts on; null is the same as absent."""

    model_config = ConfigDict(extra="allow", frozen=True)
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    model: str | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    reasoning: Reasoning | None = None
    text: TextForm | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None


def read(data: bytes) -> ParsedBody:
    """Return the request of a body. Raises RequestError, and RecursionError for a body that is nested too deeply."""
    raw = load(data)
    check_depth(raw, ResponsesBody.model_fields)
    try:
        body = ResponsesBody.model_validate(raw)
    except ValidationError as error:
        raise explained(error, raw) from error
    _check_served(body)
    messages = messages_of(body)
    tools, skipped = tools_of(body.tools or ())
    if body.truncation == "auto":
        skipped.append("truncation")
    skipped += [name for name in _WITHOUT if raw.get(name) is not None]
    chat: dict[str, Any] = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    chat |= {"messages": messages, "tools": tools or None, "max_tokens": body.max_output_tokens}
    chat |= {"tool_choice": _tool_choice(body.tool_choice), "response_format": _format(body.text)}
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.top_logprobs or _LOG_PROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if not any(message["role"] in ("user", "tool") for message in messages) or body.max_output_tokens == 1:
        raw = {"turn_type": "side", **raw}  # a client's probe of the connection
    return ParsedBody(checked(chat), raw, tuple(skipped))


def _check_served(body: ResponsesBody) -> None:
    """Raise RequestError for a feature without which the client could not use the reply."""
    if body.previous_response_id:
        raise RequestError(
            f"previous_response_id: {body.previous_response_id[:100]!r} is not found; {_STATELESS}",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    if body.conversation:
        raise RequestError(f"conversation: not found; {_STATELESS}", param="conversation")
    if body.background:
        raise RequestError("background: not served; a reply comes on the connection that asked", param="background")
    if body.prompt:
        raise RequestError("prompt: this server keeps no prompts; send instructions and input", param="prompt")


def messages_of(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the conversation as chat messages. Raises RequestError."""
    said = _Conversation()
    if body.instructions:
        said.say("system", body.instructions)
    if isinstance(body.input, str):
        said.say("user", body.input)
    else:
        for index, item in enumerate(body.input or ()):
            _add(said, item, f"input[{index}]")
    if not said.messages:
        raise RequestError("input: a text, or a list of items, is needed", param="input")
    return said.messages


class _Conversation:
    """Messages, built item by item."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reply: dict[str, Any] | None = None
        """The reply whose items come."""
        self._has_text = False
        """Its last item was a text."""

    def say(self, role: str, content: Any) -> None:
        self._reply = None
        if role in _SYSTEM and len(self.messages) == 1 and self.messages[0]["role"] in _SYSTEM:
            first = self.messages[0]
            first["content"] = f"{_plain(first['content'])}\n\n{_plain(content)}"
        else:
            self.messages.append({"role": "system" if role in _SYSTEM else role, "content": content})

    def think(self, text: str) -> None:
        reply = self._open(is_new=self._reply is not None and ("content" in self._reply or "tool_calls" in self._reply))
        before = reply.get("reasoning_content")
        reply["reasoning_content"] = text if before is None else f"{before}\n{text}"

    def answer(self, text: str) -> None:
        """Add a text of a reply; two texts in a row are two replies, for no reply has two."""
        reply = self._open(is_new=self._has_text)
        reply["content"] = reply.get("content", "") + text
        self._has_text = True

    def call(self, call: dict[str, Any]) -> None:
        self._open().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, content: Any) -> None:
        self._reply = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _open(self, *, is_new: bool = False) -> dict[str, Any]:
        if self._reply is None or is_new:
            self._reply = {"role": "assistant"}
            self.messages.append(self._reply)
        self._has_text = False
        return self._reply


def _add(said: _Conversation, item: Mapping[str, Any], at: str) -> None:
    """Add one item to the conversation."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role == "assistant":
                said.answer("".join(_texts(item.get("content"), f"{at}.content")))
            elif role in ("user", *_SYSTEM):
                said.say(role, (_content if role == "user" else _text_content)(item.get("content"), f"{at}.content"))
            else:
                raise RequestError(f"{at}.role: user, assistant, system or developer", param=f"{at}.role")
        case "function_call":
            function = {"name": _text(item, "name", at), "arguments": item.get("arguments") or "{}"}
            said.call({"id": _text(item, "call_id", at), "type": "function", "function": function})
        case "custom_tool_call":
            # Of another model in the same conversation: this server offers its model functions alone.
            function = {"name": _text(item, "name", at), "arguments": {"input": item.get("input")}}
            said.call({"id": _text(item, "call_id", at), "type": "function", "function": function})
        case "function_call_output" | "custom_tool_call_output":
            said.result(_text(item, "call_id", at), _content(item.get("output"), f"{at}.output"))
        case "reasoning":
            if thought := thought_of(item):
                said.think(thought)
        case kind:
            raise RequestError(f"{at}: this server cannot show the model an item of type {kind!r}", param=at)


def thought_of(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item: the thought itself, else its summary; empty if it is encrypted."""
    for field in ("content", "summary"):
        parts = item.get(field)
        found = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if text := "\n".join(text for text in found if isinstance(text, str) and text):
            return text
    return ""


def _text_content(content: Any, at: str) -> Any:
    """Return the content of a message of texts; several parts stay parts."""
    if isinstance(content, str):
        return content
    texts = _texts(content, at)
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _content(content: Any, at: str) -> Any:
    """Return the content of a user or tool message, which may have pictures."""
    if not isinstance(content, list) or not any(map(_is_picture, content)):
        return _text_content(content, at)
    found: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if _is_picture(part):
            found.append({"type": "image_url", "image_url": {"url": part["image_url"]}, PLACE: f"{at}[{index}]"})
        else:
            found.append({"type": "text", "text": _text_of(part, f"{at}[{index}]")})
    return found


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image" and isinstance(part.get("image_url"), str)


def _texts(content: Any, at: str) -> list[str]:
    """Return the texts of a content. Raises RequestError for a part that is no text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"{at}: a text, or a list of parts, is needed", param=at)
    return [_text_of(part, f"{at}[{index}]") for index, part in enumerate(content)]


def _text_of(part: Any, at: str) -> str:
    """Return the text of one part. Raises RequestError for a part that is no text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image":
        # A user or a tool may show one; with its URL it does not come here from them.
        why = "only a user or a tool may show one" if _is_picture(part) else "this server keeps no files of clients"
        what = "a picture" if _is_picture(part) else "a picture without image_url"
        raise RequestError(f"{at}: {what}: {why}", code="unsupported_content", param=at)
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in ("input_text", "output_text", "text", "refusal"):
        raise RequestError(
            f"{at}: this model reads text only; the part is of type {kind!r}", code="unsupported_content", param=at
        )
    if not isinstance(text, str):
        raise RequestError(f"{at}.text: a text is needed", param=f"{at}.text")
    return text


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _text(item: Mapping[str, Any], name: str, at: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise RequestError(f"{at}.{name}: a text is needed", param=f"{at}.{name}")
    return value


def tools_of(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions in the chat form, and the names of the kinds of tools that are left out."""
    found: list[dict[str, Any]] = []
    skipped: list[str] = []
    for index, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            skipped.append(f"tools of type {str(tool['type'])[:60]}")
        elif isinstance(function := tool.get("function"), dict):  # the chat form
            found.append({"type": "function", "function": function})
        else:
            _text(tool, "name", f"tools[{index}]")
            fields = ("name", "description", "parameters", "strict")
            given = {name: tool[name] for name in fields if tool.get(name) is not None}
            found.append({"type": "function", "function": given})
    return found, skipped


def _tool_choice(choice: Any) -> Any:
    """Return the choice in the chat form."""
    match choice:
        case {"type": "allowed_tools", "tools": [*tools], **rest}:
            named = [{"type": "function", "function": {"name": tool.get("name")}} for tool in map(_as_dict, tools)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": rest.get("mode", "auto"), "tools": named}}
        case _:
            return choice


def _as_dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _format(text: TextForm | None) -> Any:
    """Return `text.format` as `response_format`. Raises RequestError."""
    form = None if text is None else text.format
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": schema}}
        case _:
            raise RequestError("text.format: text, json_object, or json_schema with a schema", param="text.format")

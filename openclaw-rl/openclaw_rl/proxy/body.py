"""Read a chat body: OpenAI's Chat Completions, the form into which every dialect is converted.

`load` parses the JSON, `checked` checks its fields; unknown fields pass. Each fault is a `RequestError` that names the
field in OpenAI's terms.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from openclaw_rl.errors import RequestError
from openclaw_rl.messages import DEEPEST, Message, is_deeper
from openclaw_rl.web.bodies import place_name

_MODEL = re.compile(r"a valid dictionary(?: or instance of \w+)?")
"""Pydantic's word for a JSON object."""
_NO_GRAMMARS = frozenset((
    "ebnf", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema", "regex",
    "structural_tag", "structured_outputs",
))  # fmt: skip
"""Demands on the form of a reply, of other servers. Without the demand a client could not use the reply."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None


class ChatBody(BaseModel):
    """Fields of the body that the proxy acts on; null is the same as absent."""

    model_config = ConfigDict(extra="allow", frozen=True)
    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    """The old form of `tools`, as `function_call` of `tool_choice`: refused."""
    function_call: str | dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int | None = None
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    logit_bias: dict[Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=-100, le=100)]] | None = None
    """By token id."""
    ignore_eos: bool | None = None
    """SGLang's field: sample past the end token."""
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | float | None = None
    session_done: bool | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call: those that `tool_choice` names, or none of them if it is `none`."""
        names = tool_choice_of(self).names
        return [tool for tool in self.tools or () if names is None or tool["function"]["name"] in names]

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the chat template, from all three fields that may hold them."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.enable_thinking is not None:
            kwargs.setdefault("enable_thinking", self.enable_thinking)
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return kwargs

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def json_schema(self) -> str | None:
        """The grammar that the client asks for, as a JSON schema; the engine may refuse it."""
        form = self.response_format or {}
        match form.get("type"):
            case "json_object":
                return '{"type":"object"}'
            case "json_schema":
                return orjson.dumps(form["json_schema"]["schema"]).decode()
            case _:
                return None


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A checked body, and the same body as the client sent it."""

    chat: ChatBody
    raw: Mapping[str, Any]
    """The JSON object as sent, in the client's dialect; `sessions.classify` reads more fields of it."""
    skipped: tuple[str, ...] = ()
    """Features of another dialect that are served without; the log names each once."""


def parse_body(data: bytes) -> ParsedBody:
    """Parse and check a chat body. Raises RequestError, and RecursionError for a body that is nested too deeply."""
    raw = load(data)
    if data.count(b"{") + data.count(b"[") > DEEPEST:  # nothing is deeper than its text has brackets
        check_depth(raw, ChatBody.model_fields)
    return ParsedBody(_checked(raw), raw)


def load(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises RequestError, and RecursionError for one that is nested too deeply."""
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if "ecursion" in str(error):
            raise RecursionError from error
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return raw


def checked(raw: Mapping[str, Any]) -> ChatBody:
    """Return the fields of a chat body. Raises RequestError."""
    check_depth(raw, ChatBody.model_fields)
    return _checked(raw)


def _checked(raw: Mapping[str, Any]) -> ChatBody:
    try:
        chat = ChatBody.model_validate(raw)
    except ValidationError as error:
        raise explained(error, raw) from error
    for index, message in enumerate(chat.messages):
        at = f"messages[{index}]"
        if message.role not in _ROLES:
            raise RequestError(f"{at}.role: one of {', '.join(sorted(_ROLES))}", param=f"{at}.role")
        if message.role == "user" and message.content is None:
            raise RequestError(f"{at}.content: a string, or a list of parts, is needed", param=f"{at}.content")
    if chat.n not in (None, 1):
        raise RequestError("n > 1 is not supported: every reply is recorded as one turn", param="n")
    for index, tool in enumerate(chat.tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{index}].function.name is missing", param=f"tools[{index}]")
    tool_choice_of(chat)
    _check_old_functions(chat)
    for field in _NO_GRAMMARS & raw.keys():
        if raw[field]:
            raise RequestError(f"{field}: not served here; send response_format with a JSON schema", param=field)
    _check_format(chat.response_format)
    return chat


def check_depth(raw: Mapping[str, Any], fields: Collection[str]) -> None:
    """Raise RequestError for a deep field among `fields`; those that the proxy does not read may be deep."""
    # Templates and writers of JSON recurse.
    for field in raw.keys() & fields:
        if is_deeper(value := raw[field], DEEPEST):
            items = enumerate(value) if isinstance(value, list) else ()
            place = next((f"{field}[{n}]" for n, item in items if is_deeper(item, DEEPEST - 1)), field)
            raise RequestError(f"{place}: nested more than {DEEPEST} levels deep", param=place)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that `tool_choice` allows, and its demand for a call."""

    names: frozenset[str] | None = None
    """None: all tools."""
    is_demand: bool = False


def tool_choice_of(chat: ChatBody) -> ToolChoice:
    """Return the meaning of `tool_choice`. Raises RequestError for a choice that names no offered tool."""
    choice, offered = chat.tool_choice, [tool["function"]["name"] for tool in chat.tools or ()]
    match choice:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice(frozenset())
        case "required":
            wanted, is_demand = offered, True
            if not offered:
                raise RequestError(
                    "tool_choice: required is a demand for a call, and tools is empty", param="tool_choice"
                )
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            wanted, is_demand = [name], True
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}} if (
            tools
        ):
            wanted, is_demand = [_name_of(tool) for tool in tools], mode == "required"
        case _:
            raise RequestError("tool_choice: auto, none, required or a function", param="tool_choice")
    for name in wanted:
        if name not in offered:
            raise RequestError(
                f"tool_choice: {name[:100]!r} is not among the tools of the request", param="tool_choice"
            )
    return ToolChoice(frozenset(wanted), is_demand)


def _name_of(tool: object) -> str:
    match tool:
        case {"function": {"name": str(name)}}:
            return name
    raise RequestError("tool_choice.allowed_tools.tools: functions with a name", param="tool_choice")


def _check_old_functions(chat: ChatBody) -> None:
    """Raise RequestError for the form of tools that `tools` replaced."""
    # Served as tools they would come back in a form that such a client does not read.
    if chat.functions:
        raise RequestError("functions: an old form that is not served; send tools", param="functions")
    if isinstance(chat.function_call, dict):
        raise RequestError(
            "function_call: an old form that is not served; send tools and tool_choice", param="function_call"
        )
    for index, message in enumerate(chat.messages):
        if (message.model_extra or {}).get("function_call"):
            place = f"messages[{index}].function_call"
            raise RequestError(f"{place}: an old form that is not served; send tool_calls", param=place)


def _check_format(form: Mapping[str, Any] | None) -> None:
    """Raise RequestError for an unknown response format."""
    # Without this check an unknown format would be ignored without an error.
    if form is None:
        return
    if form.get("type") not in ("text", "json_object", "json_schema"):
        raise RequestError("response_format.type: text, json_object or json_schema", param="response_format.type")
    wrapper = form.get("json_schema")
    if form["type"] == "json_schema" and not (isinstance(wrapper, dict) and isinstance(wrapper.get("schema"), dict)):
        raise RequestError(
            "response_format.json_schema.schema: an object is needed", param="response_format.json_schema.schema"
        )


def explained(error: ValidationError, raw: Mapping[str, Any]) -> RequestError:
    """Return the first fault as a RequestError.

    Pydantic reports a field of several possible types once for each type. The reports of the longest path are kept:
    they belong to the type that the value is closest to.
    """
    found = [(_place(detail, raw), detail["msg"]) for detail in error.errors()]
    first = found[0][0]
    place = max((place for place, _ in found if place[: len(first)] == first), key=len)
    said = dict.fromkeys(msg for at, msg in found if at == place)
    what = " or ".join(msg.removeprefix("Input should be ") if n else msg for n, msg in enumerate(said))
    where = place_name(place)
    return RequestError(f"{where}: {_MODEL.sub('an object', what)}", param=where or None)


def _place(detail: ErrorDetails, raw: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Return the path of a fault in the body: pydantic's path without the names of the types that it tried."""
    node: Any = raw
    place: list[str | int] = []
    for part in detail["loc"]:
        if isinstance(part, int) if isinstance(node, list) else isinstance(node, dict) and part in node:
            node = node[part]
        elif detail["type"] != "missing" or part != detail["loc"][-1]:
            continue
        place.append(part)
    return tuple(place)

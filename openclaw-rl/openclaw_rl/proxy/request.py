"""Parse, check and prepare a chat request: ids to sample from, session, kind of turn, sampling parameters.

`parse_body` checks the body; unknown fields pass. `prepare` renders the prompt and classifies the request. Each fault
is a `RequestError` that names the field in OpenAI's terms. Nothing is recorded here, and no engine is called.
"""

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from openclaw_rl.errors import RequestError
from openclaw_rl.messages import DEEPEST, Message, is_deeper
from openclaw_rl.proxy.deps import ProxyDeps
from openclaw_rl.proxy.frontend import Rendered
from openclaw_rl.proxy.generation import EngineExtras
from openclaw_rl.proxy.sglang import Tool, get_json_schema_constraint
from openclaw_rl.sessions.classify import Classified, classify, group_of, identify
from openclaw_rl.settings import SamplingSettings
from openclaw_rl.types import Request, SamplingParams, Scope, TurnType
from openclaw_rl.web.auth import Caller
from openclaw_rl.web.bodies import place_name

_MODEL = re.compile(r"a valid dictionary(?: or instance of \w+)?")
"""Pydantic's word for a JSON object."""
_TRUE = frozenset({"1", "true", "yes", "on"})
"""Values of a header that is a switch."""
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
    """The JSON object as sent; `sessions.classify` reads more fields of it."""


def parse_body(data: bytes) -> ParsedBody:
    """Parse and check the body. Raises RequestError, and RecursionError for a body that is nested too deeply."""
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if "ecursion" in str(error):
            raise RecursionError from error
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    _check_depth(raw)
    try:
        chat = ChatBody.model_validate(raw)
    except ValidationError as error:
        raise _explained(error, raw) from error
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
    return ParsedBody(chat, raw)


def _check_depth(raw: Mapping[str, Any]) -> None:
    """Raise RequestError for a deep field; those that the proxy does not read may be. Templates and writers recurse."""
    for field in ChatBody.model_fields.keys() & raw.keys():
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


def sampling_of(
    chat: ChatBody, defaults: SamplingSettings, *, prompt_tokens: int, context_length: int
) -> SamplingParams:
    """Return the client's sampling parameters, else our defaults; `max_new_tokens` fits the rest of the context.

    Raises RequestError (`context_length_exceeded`) if the prompt leaves no room.
    """
    room = context_length - prompt_tokens - 1
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {context_length} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
        )
    wanted = chat.max_completion_tokens or chat.max_tokens or defaults.max_new_tokens
    return SamplingParams(
        max_new_tokens=min(wanted, room),
        temperature=defaults.temperature if chat.temperature is None else chat.temperature,
        top_p=chat.top_p or defaults.top_p,
        top_k=defaults.top_k if chat.top_k is None else (chat.top_k or -1),
        min_p=chat.min_p or 0.0,
        frequency_penalty=chat.frequency_penalty or 0.0,
        presence_penalty=chat.presence_penalty or 0.0,
        repetition_penalty=chat.repetition_penalty or 1.0,
        seed=None if chat.seed is not None and chat.seed < 0 else chat.seed,  # -1 is "any", as in llama.cpp and vLLM
        stop=(chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ()),
        reshapes_logits=bool(chat.logit_bias) or chat.json_schema is not None,
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be served: rendered to ids, classified, with its session id."""

    request: Request
    rendered: Rendered
    classified: Classified
    extras: EngineExtras
    opted_out: bool
    session_done: bool
    wants_log_probs: bool
    one_call: bool = False
    """The client wants no second call in the reply."""
    demands_call: bool = False
    """A reply without a call must not be sent."""
    is_forced: bool = False
    """A grammar makes the reply a JSON list of calls."""


async def prepare(deps: ProxyDeps, caller: Caller, headers: Mapping[str, str], body: ParsedBody) -> Prepared:
    """Render and classify the request. Raises RequestError."""
    chat, messages, received_at = body.chat, body.chat.messages, deps.clock()
    tools, kwargs, choice = chat.offered_tools, chat.template_kwargs, tool_choice_of(chat)
    if choice.is_demand and not deps.frontend.renders_tools:
        raise RequestError(
            "tool_choice: this model's template shows it no tools, so that no call can be demanded", param="tool_choice"
        )
    one_call, is_forced = chat.parallel_tool_calls is False, choice.is_demand and deps.has_grammars
    if is_forced:
        kwargs.setdefault("enable_thinking", False)  # the grammar leaves no room for a thought
    rendered = await deps.frontend.render_async(messages, tools, kwargs)
    grammar = _calls_schema(rendered.tools, one_call=one_call) if is_forced else chat.json_schema
    sampling = sampling_of(
        chat, deps.sampling, prompt_tokens=len(rendered.ids), context_length=deps.frontend.context_length
    )
    if is_forced:
        sampling = replace(sampling, reshapes_logits=True)
    classified = classify(headers, body.raw, messages, bool(tools), TurnType(deps.session.turn_type_default))
    session_id = identify(headers, body.raw, messages)
    request = Request(
        request_id=f"req-{uuid.uuid4().hex}",
        scope=Scope(caller.user, session_id),
        received_at=received_at,
        messages=tuple(messages),
        tools_json=orjson.dumps(tools).decode() if tools else None,
        template_kwargs_json=orjson.dumps(kwargs).decode() if kwargs else None,
        prompt_ids=rendered.ids,
        sampling=sampling,
        episode=_text(body.raw.get("episode")),
        task=_text(body.raw.get("task")),
        step=_step(body.raw.get("step")),
        group=group_of(body.raw) if session_id is None else None,
    )
    return Prepared(
        request=request,
        rendered=rendered,
        classified=classified,
        extras=EngineExtras(
            json_schema=grammar,
            logit_bias=chat.logit_bias,
            top_logprobs=(chat.top_logprobs or 0) if chat.logprobs else 0,
            ignore_eos=bool(chat.ignore_eos),
        ),
        opted_out=not caller.train or headers.get("x-openclaw-train", "").strip().lower() == "off",
        session_done=bool(chat.session_done) or headers.get("x-session-done", "").strip().lower() in _TRUE,
        wants_log_probs=bool(chat.logprobs),
        one_call=one_call,
        demands_call=choice.is_demand,
        is_forced=is_forced,
    )


def _calls_schema(tools: Sequence[Tool], *, one_call: bool) -> str:
    """Return the grammar of a list of calls of these tools. Raises RequestError for parameters that are no schema."""
    try:
        schema = get_json_schema_constraint(list(tools), "required", parallel_tool_calls=not one_call)
    except (ValueError, LookupError, AttributeError) as error:
        raise RequestError(f"tools: no grammar can be made of these parameters: {error}", param="tools") from error
    return orjson.dumps(schema).decode()


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


def _explained(error: ValidationError, raw: Mapping[str, Any]) -> RequestError:
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


def _step(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if abs(value) >= 2**63:
        raise RequestError("step is larger than a step can be", param="step")
    return value


def _text(value: object) -> str | None:
    return None if value is None or isinstance(value, bool | dict | list) else str(value)

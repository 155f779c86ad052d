"""Prepare a chat request: ids to sample from, session, kind of turn, sampling parameters.

`prepare` renders the prompt and classifies the request; `render` alone is for a count of tokens.
Nothing is recorded here, and no engine is called.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from openclaw_rl.engines.pictures import PicturePrompt, PictureUrls
from openclaw_rl.errors import RequestError
from openclaw_rl.messages import Message
from openclaw_rl.proxy.body import ChatBody, ParsedBody, tool_choice_of
from openclaw_rl.proxy.deps import ProxyDeps
from openclaw_rl.proxy.episodes import episode_named, registered
from openclaw_rl.proxy.frontend import Rendered
from openclaw_rl.proxy.generation import EngineExtras
from openclaw_rl.proxy.sglang import Tool, get_json_schema_constraint
from openclaw_rl.sessions.classify import Classified, classify, group_of, identify
from openclaw_rl.sessions.commands import without_commands
from openclaw_rl.settings import SamplingSettings
from openclaw_rl.types import SHARED_POLICY, Ids, Request, SamplingParams, Scope, TurnType
from openclaw_rl.types.pictures import Picture
from openclaw_rl.web.auth import Caller

_TRUE = frozenset({"1", "true", "yes", "on"})
"""Values of a header that is a switch."""


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
    shown: PicturePrompt | None = None
    """The prompt as the engine gets it, where it has pictures."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat as the model sees it."""

    messages: Sequence[Message]
    """Without commands."""
    template_kwargs: Mapping[str, Any]
    rendered: Rendered
    demands_call: bool
    is_forced: bool
    """A grammar makes the reply a JSON list of calls."""
    pictures: tuple[Picture, ...] = ()
    """Pictures of the prompt in its order, with their bytes."""


async def render(deps: ProxyDeps, caller: Caller, chat: ChatBody, pictures: Mapping[str, Picture]) -> Prompt:
    """Render a chat; pictures: those that its messages refer to, by digest. Raises RequestError."""
    sent, kwargs, demands_call = chat.messages, chat.template_kwargs, tool_choice_of(chat).is_demand
    has_commands = deps.commands is not None and caller.has_commands
    messages = (without_commands(sent) or sent) if has_commands else sent
    if demands_call and not deps.frontend.renders_tools:
        raise RequestError(
            "tool_choice: this model's template shows it no tools, so that no call can be demanded", param="tool_choice"
        )
    is_forced = demands_call and deps.has_grammars
    if is_forced:
        kwargs.setdefault("enable_thinking", False)  # the grammar leaves no room for a thought
    rendered = await deps.frontend.render_async(messages, chat.offered_tools, kwargs, shows_pictures=True)
    shown = tuple(pictures[picture.digest] for picture in rendered.pictures)
    return Prompt(messages, kwargs, rendered, demands_call, is_forced, shown)


async def prepare(
    deps: ProxyDeps, caller: Caller, headers: Mapping[str, str], body: ParsedBody, pictures: Mapping[str, Picture]
) -> Prepared:
    """Render and classify the request; pictures: as of `render`. Raises RequestError."""
    chat, sent, received_at = body.chat, body.chat.messages, deps.clock()
    tools, one_call = chat.offered_tools, chat.parallel_tool_calls is False
    prompt = await render(deps, caller, chat, pictures)
    rendered, kwargs, is_forced = prompt.rendered, prompt.template_kwargs, prompt.is_forced
    grammar = _calls_schema(rendered.tools, one_call=one_call) if is_forced else chat.json_schema
    sampling = sampling_of(
        chat, deps.sampling, prompt_tokens=len(rendered.ids), context_length=deps.frontend.context_length
    )
    if is_forced:
        sampling = replace(sampling, reshapes_logits=True)
    name = episode_named(headers, body.raw)
    episode = await registered(deps, caller, headers, name)
    classified = classify(headers, body.raw, sent, bool(tools), TurnType(deps.session.turn_type_default))
    session_id = identify(headers, body.raw, sent)
    if episode is not None:
        if classified.kind == "subagent":  # it acts in the same environment
            classified = Classified(TurnType.MAIN, "user")
        session_id = session_id or f"episode:{name}"
    request = Request(
        request_id=f"req-{uuid.uuid4().hex}",
        # Episodes are compared with each other: they train the shared policy.
        scope=Scope(caller.user, session_id, SHARED_POLICY if episode is not None else deps.policy_of(caller.user)),
        received_at=received_at,
        messages=tuple(prompt.messages),
        tools_json=orjson.dumps(tools).decode() if tools else None,
        template_kwargs_json=orjson.dumps(kwargs).decode() if kwargs else None,
        prompt_ids=rendered.ids,
        pictures=prompt.pictures,
        sampling=sampling,
        episode=name,
        task=_text(body.raw.get("task")) if episode is None else episode.task,
        step=_step(body.raw.get("step")),
        in_episode=None if episode is None else episode.number,
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
        demands_call=prompt.demands_call,
        is_forced=is_forced,
        shown=_shown(deps, rendered.ids, prompt.pictures),
    )


def _shown(deps: ProxyDeps, ids: Ids, pictures: Sequence[Picture]) -> PicturePrompt | None:
    vision = deps.frontend.vision
    if not pictures or vision is None:
        return None
    return PicturePrompt.of(ids, PictureUrls(pictures, deps.pictures.memory), vision.placeholder, vision.reserved)


def _calls_schema(tools: Sequence[Tool], *, one_call: bool) -> str:
    """Return the grammar of a list of calls of these tools. Raises RequestError for parameters that are no schema."""
    try:
        schema = get_json_schema_constraint(list(tools), "required", parallel_tool_calls=not one_call)
    except (ValueError, LookupError, AttributeError) as error:
        raise RequestError(f"tools: no grammar can be made of these parameters: {error}", param="tools") from error
    return orjson.dumps(schema).decode()


def _step(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if abs(value) >= 2**63:
        raise RequestError("step is larger than a step can be", param="step")
    return value


def _text(value: object) -> str | None:
    return None if value is None or isinstance(value, bool | dict | list) else str(value)

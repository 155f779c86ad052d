"""A checked request made ready to be served: rendered to ids, classified, named after its session. Nothing is recorded
yet, and the engine was not asked.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from openclaw_rl.errors import RequestError
from openclaw_rl.proxy.auth import Caller
from openclaw_rl.proxy.body import ParsedBody, sampling_of
from openclaw_rl.proxy.frontend import Rendered
from openclaw_rl.proxy.generation import EngineExtras
from openclaw_rl.proxy.ports import ProxyDeps
from openclaw_rl.sessions.identity import identify
from openclaw_rl.sessions.turn_type import Classified, classify
from openclaw_rl.types import Request, Scope, TurnType


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be served."""

    request: Request
    rendered: Rendered
    classified: Classified
    extras: EngineExtras
    opted_out: bool
    session_done: bool
    wants_log_probs: bool


async def prepare(deps: ProxyDeps, caller: Caller, headers: Mapping[str, str], body: ParsedBody) -> Prepared:
    """Render and classify. Raises RequestError."""
    chat, messages, received_at = body.chat, body.chat.messages, deps.clock()
    tools, kwargs = chat.offered_tools, chat.template_kwargs
    rendered = await deps.frontend.render_async(messages, tools, kwargs)
    sampling = sampling_of(
        chat, deps.sampling, prompt_tokens=len(rendered.ids), context_length=deps.frontend.context_length
    )
    classified = classify(headers, body.raw, messages, bool(tools), TurnType(deps.session.turn_type_default))
    request = Request(
        request_id=f"req-{uuid.uuid4().hex}",
        scope=Scope(caller.user, identify(headers, body.raw, messages)),
        received_at=received_at,
        messages=tuple(messages),
        tools_json=orjson.dumps(tools).decode() if tools else None,
        template_kwargs_json=orjson.dumps(kwargs).decode() if kwargs else None,
        prompt_ids=rendered.ids,
        sampling=sampling,
        episode=_text(body.raw.get("episode")),
        task=_text(body.raw.get("task")),
        step=_step(body.raw.get("step")),
    )
    return Prepared(
        request=request,
        rendered=rendered,
        classified=classified,
        extras=EngineExtras(
            json_schema=chat.json_schema,
            logit_bias=chat.logit_bias,
            top_logprobs=(chat.top_logprobs or 0) if chat.logprobs else 0,
            ignore_eos=bool(chat.ignore_eos),
        ),
        opted_out=not caller.train or headers.get("x-openclaw-train", "").strip().lower() == "off",
        session_done=bool(chat.session_done) or headers.get("x-session-done", "").strip().lower() in ("1", "true"),
        wants_log_probs=bool(chat.logprobs),
    )


def _step(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if abs(value) >= 2**63:
        raise RequestError("step is larger than a step can be", param="step")
    return value


def _text(value: object) -> str | None:
    return None if value is None or isinstance(value, bool | dict | list) else str(value)

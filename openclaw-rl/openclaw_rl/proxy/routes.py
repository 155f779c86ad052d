"""Routes of the chat API: `/v1/chat/completions`, `/v1/models`, `/v1/models/NAME`, and the same without `/v1`.

Each fault of a request is a 4xx in OpenAI's error form; a 4xx of the engine keeps its status and message. While the
engine is away, a request waits (keep-alives flow), then gets 503 with Retry-After. When a client leaves, its engine
request is aborted.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Literal

import structlog
from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl.errors import EngineError, EngineRefused, RequestError
from openclaw_rl.proxy import responses
from openclaw_rl.proxy.deps import ProxyDeps
from openclaw_rl.proxy.reply import Reply
from openclaw_rl.proxy.request import ParsedBody, Prepared, parse_body, prepare
from openclaw_rl.web import bodies
from openclaw_rl.web.auth import Keys
from openclaw_rl.web.bodies import answer, answer_unread, read_body
from openclaw_rl.web.client_gone import ClientGone, until_gone
from openclaw_rl.web.sse import EventSender

log = structlog.get_logger()

_OPEN_AFTER_S = 0.1
"""A stream's head waits this long for a refusal of the engine, which comes within milliseconds; then it is sent."""
_RETRY_AFTER_S = 2
_INLINE_BYTES = 256 * 1024
"""Largest body that the event loop parses (about 1 ms); larger ones go to a thread."""
_VERSION = re.compile(r"(?:@(?P<at>.*)|-v(?P<dash>\d+))\Z", re.DOTALL)
_NOT_SERVED = (
    "best_of", "continue_final_message", "dry_multiplier", "include_reasoning", "include_stop_str_in_output",
    "length_penalty", "min_new_tokens", "min_tokens", "mirostat", "modalities", "separate_reasoning", "stop_token_ids",
    "typical_p", "use_beam_search", "verbosity", "web_search_options",
)  # fmt: skip
"""Wishes of other servers' clients that would change a reply: served without, and the log says so once."""
_NUMBER = re.compile(r"v?(\d{1,9})\Z")


def build_router(deps: ProxyDeps) -> APIRouter:
    """Return the chat routes over `deps`."""
    chat, models = _ChatRoute(deps), _ModelsRoute(deps)
    router = APIRouter()
    for prefix in ("/v1", ""):
        router.routes.append(Route(f"{prefix}/chat/completions", chat, methods=["POST"]))
        router.routes.append(Route(f"{prefix}/models", models, methods=["GET"]))
        router.routes.append(Route(f"{prefix}/models/{{name:path}}", models, methods=["GET"]))
    return router


def chats_first(app: ASGIApp, router: APIRouter) -> ASGIApp:
    """Return `app` with the chats of `router` served past its middleware. `router` is from `build_router`."""
    # The middleware does no work for a chat, and costs every streamed token a few microseconds.
    direct = {route.path: route.app for route in router.routes if isinstance(route, Route) and _is_chat(route)}

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        chat = direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (chat or app)(scope, receive, send)

    return serve


def _is_chat(route: Route) -> bool:
    return isinstance(route.endpoint, _ChatRoute)


class _ModelsRoute:
    """The model list, and one model by name."""

    def __init__(self, deps: ProxyDeps) -> None:
        self._about = (deps.model_name, deps.frontend.context_length, int(time.time()))
        self._all = responses.models(*self._about)
        self._names = ModelNames(deps.model_name, "refuse", lambda: deps.serving.current, lambda _: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Without a key, because OpenClaw sends none here. The answer holds only a name and a length.
        name = scope.get("path_params", {}).get("name")
        if not name:
            await answer(send, 200, self._all)
            return
        try:
            self._names.wanted_version(name)
        except RequestError as error:
            await _refuse(receive, send, error, is_read=True)
        else:
            await answer(send, 200, responses.model(name, *self._about))


class _ChatRoute:
    """The chat endpoint: reads a body, serves one `Reply`, writes JSON or server-sent events."""

    def __init__(self, deps: ProxyDeps) -> None:
        self._deps = deps
        self._keys = Keys(deps.server.api_keys)
        self._limit = int(deps.server.max_body_mb * 2**20)
        self._running = 0
        self._warned: set[str] = set()
        self._names = ModelNames(
            deps.model_name, deps.server.unknown_model, lambda: deps.serving.current, self._warn_of_alias
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        data, is_read = b"", False
        self._running += 1
        try:
            if self._running > self._deps.server.max_streams:
                raise RequestError("too many chats at once; try again", status=503, code="overloaded")
            caller = self._keys.caller(headers.get("authorization"))
            data = await read_body(scope, receive, self._limit, timeout_s=self._deps.server.body_timeout_s)
            is_read = True
            body = parse_body(data) if len(data) < _INLINE_BYTES else await asyncio.to_thread(parse_body, data)
            only_version = self._names.wanted_version(body.chat.model)
            self._warn(body)
            prepared = await prepare(self._deps, caller, headers, body)
            await self._serve(Reply(self._deps, prepared, only_version), prepared, body, receive, send)
        except (RequestError, EngineError) as error:
            await _refuse(receive, send, error, is_read=is_read)
        except (RecursionError, TypeError) as error:
            # Templates, schemas and JSON writers recurse: the depth of a small body is their limit. orjson's is 254.
            if isinstance(error, TypeError) and "ecursion" not in str(error):
                raise
            await _refuse(receive, send, bodies.nested_too_deeply(data), is_read=is_read)
        except ClientGone:
            return
        except asyncio.CancelledError:
            # The stop cut the reply after `drain_s`. It is recorded, and uvicorn would log the cancellation as a fault.
            log.info("reply_cut_by_stop")
        finally:
            self._running -= 1

    async def _serve(self, reply: Reply, prepared: Prepared, body: ParsedBody, receive: Receive, send: Send) -> None:
        work = self._stream if body.chat.stream else self._whole
        await work(reply, prepared, body, receive, send)

    async def _whole(self, reply: Reply, prepared: Prepared, body: ParsedBody, receive: Receive, send: Send) -> None:
        async def work() -> None:
            async with reply:
                async for _ in reply.steps():
                    pass
                await reply.commit()

        if not await until_gone(receive, work()):
            return
        text = responses.completion(
            reply_id=reply.reply_id,
            model=self._model(body),
            created=int(prepared.request.received_at),
            message=reply.message(),
            finish_reason=reply.finish_reason,
            usage=reply.usage,
            log_probs=reply.log_probs(),
        )
        await answer(send, 200, text, self._headers(reply, prepared))

    async def _stream(self, reply: Reply, prepared: Prepared, body: ParsedBody, receive: Receive, send: Send) -> None:
        chunks = responses.Chunks(
            reply_id=reply.reply_id, model=self._model(body), created=int(prepared.request.received_at)
        )
        sender = EventSender(
            send,
            headers=lambda: {"cache-control": "no-cache", "x-accel-buffering": "no", **self._headers(reply, prepared)},
            opening=chunks.role(),
            is_held=lambda: reply.weight_version is None or not reply.has_arrived,
            open_after_s=_OPEN_AFTER_S,
            keepalive_s=self._deps.server.keepalive_s,
            stall_s=self._deps.server.stall_s,
        )

        async def work() -> None:
            async with reply:
                async for step in reply.steps():
                    if event := chunks.delta(step.delta, step.log_probs):
                        await sender.event(event)
                await reply.commit()
            last = chunks.finish(reply.finish_reason)
            if body.chat.includes_usage:
                last += chunks.usage(reply.usage)
            await sender.end(last + responses.DONE)

        try:
            await until_gone(receive, work(), sender.keep_alive())
        except (RequestError, EngineError) as error:
            if not sender.is_open:
                raise
            fault = error if isinstance(error, RequestError) else _as_request_error(error)
            log.warning("stream_failed", reply_id=reply.reply_id, status=fault.status, error=fault.message)
            await sender.end(bodies.error_event(fault.message, status=fault.status, code=fault.code, param=fault.param))

    def _headers(self, reply: Reply, prepared: Prepared) -> Mapping[str, str]:
        headers = {}
        if reply.weight_version is not None:
            headers["x-weight-version"] = str(reply.weight_version)
        if prepared.request.scope.session_id is not None:
            headers["x-session-id"] = prepared.request.scope.session_id
        if not reply.is_recorded:
            headers["x-openclaw-recorded"] = "false"
        return headers

    def _model(self, body: ParsedBody) -> str:
        return body.chat.model or self._deps.model_name

    def _warn(self, body: ParsedBody) -> None:
        """Log a request for a feature that is not served; one line for each feature."""
        chat = body.chat
        if chat.offered_tools and not self._deps.frontend.renders_tools:
            self._once("tools", "tools_not_shown", reason="the model's template has no tools: served without")

        for field in _NOT_SERVED:
            if body.raw.get(field) is not None:
                self._once(f"field {field}", "field_not_served", field=field)
        if any(tool["function"].get("strict") for tool in chat.offered_tools):
            self._once("strict", "field_not_served", field="tools[].function.strict")

    def _warn_of_alias(self, name: str) -> None:
        self._once(f"model {name[:100]}", "other_model_named", named=name[:100], served=self._deps.model_name)

    def _once(self, key: str, event: str, **fields: str) -> None:
        if key not in self._warned and len(self._warned) < 1000:
            self._warned.add(key)
            log.warning(event, **fields)


class ModelNames:
    """Names by which a client may ask for the policy.

    Our own names are the served name and `policy`. Alone, each means the current version; with a version behind it
    (`policy@v7`, `policy-v7`), that version or a 404. Any other name is an alias: a client with a fixed model name
    still gets the policy, with one warning in the log. `server.unknown_model = "refuse"` makes an alias a 404.
    """

    def __init__(
        self, served: str, unknown: Literal["serve", "refuse"], current: Callable[[], int], warn: Callable[[str], None]
    ) -> None:
        """warn: called with each alias that is served."""
        self._own, self._unknown, self._current, self._warn = (served, "policy"), unknown, current, warn

    def wanted_version(self, name: str | None) -> int | None:
        """Return the version that must answer; None means the current one.

        Raises RequestError (404, `model_not_found`).
        """
        if not name or name in self._own:
            return None
        for own in self._own:
            if name.startswith(own) and (found := _VERSION.match(name, len(own))):
                number = _NUMBER.match(found["dash"] or found["at"])
                if number is None or int(number[1]) != self._current():
                    raise self.not_found(name)
                return int(number[1])
        if self._unknown == "refuse":
            raise self.not_found(name)
        self._warn(name)
        return None

    def not_found(self, name: str) -> RequestError:
        served = ", ".join(dict.fromkeys((*self._own, f"policy@v{self._current()}")))
        return RequestError(
            f"The model {name[:100]!r} does not exist. Served here: {served}.",
            status=404,
            code="model_not_found",
            param="model",
        )


async def _refuse(receive: Receive, send: Send, error: RequestError | EngineError, *, is_read: bool) -> None:
    fault = error if isinstance(error, RequestError) else _as_request_error(error)
    headers = {"retry-after": str(_RETRY_AFTER_S)} if fault.status == 503 else {}
    if isinstance(error, EngineRefused) and error.retry_after is not None:
        headers["retry-after"] = error.retry_after
    text = bodies.error(fault.message, status=fault.status, code=fault.code, param=fault.param)
    if is_read:
        await answer(send, fault.status, text, headers)
    else:
        await answer_unread(receive, send, fault.status, text, headers)


def _as_request_error(error: EngineError) -> RequestError:
    if isinstance(error, EngineRefused):
        return RequestError(error.message, status=error.status, code="engine_refused")
    return RequestError("the engine is not available; try again", status=503, code="engine_unavailable")

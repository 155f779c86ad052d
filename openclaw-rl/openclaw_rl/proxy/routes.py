"""Routes of the chat APIs, each with `/v1` before it and without: `/chat/completions`, `/responses`, `/messages`,
`/messages/count_tokens`, `/models` and `/models/NAME`.

All chats take one path; a dialect only translates at its ends. Each fault of a request is a 4xx in the dialect's form;
a 4xx of the engine keeps its status and message. While the engine is away, a request waits (keep-alives flow), then
gets 503 with Retry-After. When a client leaves, its engine request is aborted.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace

import orjson
import structlog
from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl.errors import EngineError, EngineRefused, RequestError
from openclaw_rl.proxy.body import ParsedBody
from openclaw_rl.proxy.commands import Commanded, answer_of, commanded, written
from openclaw_rl.proxy.deps import ProxyDeps
from openclaw_rl.proxy.dialects import DIALECTS, AnthropicMessages, ChatCompletions, Dialect, messages_request
from openclaw_rl.proxy.dialects.base import Asked
from openclaw_rl.proxy.episodes import PATH_EPISODE, episode_named, with_episode_paths
from openclaw_rl.proxy.model_names import ModelFacts, ModelNames, model_card, model_list
from openclaw_rl.proxy.parser import Delta
from openclaw_rl.proxy.pictures import has_pictures
from openclaw_rl.proxy.quotas import Quotas
from openclaw_rl.proxy.reply import Reply
from openclaw_rl.proxy.request import Prepared, prepare, render
from openclaw_rl.web import bodies
from openclaw_rl.web.auth import Caller, Keys
from openclaw_rl.web.bodies import answer, answer_unread, read_body
from openclaw_rl.web.client_gone import ClientGone, until_gone
from openclaw_rl.web.sse import EventSender

log = structlog.get_logger()

_Headers = Mapping[str, str]
"""The headers by lower-case name, the first one of each name."""
_OPEN_AFTER_S = 0.1
"""A stream's head waits this long for a refusal of the engine, which comes within milliseconds; then it is sent."""
_RETRY_AFTER_S = 2
_INLINE_BYTES = 256 * 1024
"""Largest body that the event loop parses (about 1 ms); larger ones go to a thread."""
_NOT_SERVED = (
    "best_of", "continue_final_message", "dry_multiplier", "include_reasoning", "include_stop_str_in_output",
    "length_penalty", "min_new_tokens", "min_tokens", "mirostat", "modalities", "separate_reasoning", "stop_token_ids",
    "typical_p", "use_beam_search", "verbosity", "web_search_options",
)  # fmt: skip
"""Wishes of other servers' clients that would change a reply: served without, and the log says so once."""


def build_router(deps: ProxyDeps) -> APIRouter:
    """Return the chat routes over `deps`."""
    shared, models = _Shared(deps), _ModelsRoute(deps)
    router = APIRouter()
    for prefix in ("/v1", ""):
        for dialect in DIALECTS:
            router.routes.append(Route(prefix + dialect.path, _ChatRoute(shared, dialect), methods=["POST"]))
        count = _CountRoute(shared, AnthropicMessages())
        router.routes.append(Route(f"{prefix}/messages/count_tokens", count, methods=["POST"]))
        router.routes.append(Route(f"{prefix}/models", models, methods=["GET"]))
        router.routes.append(Route(f"{prefix}/models/{{name:path}}", models, methods=["GET"]))
    return router


def chats_first(app: ASGIApp, router: APIRouter) -> ASGIApp:
    """Return `app` with the chats of `router` served past its middleware, and with the base URLs of episodes.

    `router` is from `build_router`.
    """
    # The middleware does no work for a chat, and costs every streamed token a few microseconds.
    direct = {route.path: route.app for route in router.routes if isinstance(route, Route) and _is_chat(route)}

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        chat = direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (chat or app)(scope, receive, send)

    return with_episode_paths(serve)


def _is_chat(route: Route) -> bool:
    return isinstance(route.endpoint, _Endpoint)


class _ModelsRoute:
    """The model list, and one model by name."""

    def __init__(self, deps: ProxyDeps) -> None:
        frontend, length = deps.frontend, deps.sampling.max_new_tokens
        facts = ModelFacts(frontend.context_length, length, frontend.renders_tools, frontend.thinks)
        self._about = (deps.model_name, int(time.time()), facts)
        self._all = model_list(*self._about)
        self._names = ModelNames(deps.model_name, "refuse", lambda: _one_version(deps), lambda _: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Without a key, because OpenClaw sends none here. The answer holds only a name and a length.
        name = scope.get("path_params", {}).get("name")
        if not name:
            await answer(send, 200, self._all)
            return
        try:
            self._names.wanted_version(name)
        except RequestError as error:
            dialect = AnthropicMessages() if "anthropic-version" in Headers(scope=scope) else ChatCompletions()
            await _refuse(dialect, _new_id(), receive, send, error, is_read=True)
        else:
            await answer(send, 200, model_card(name, *self._about))


class _Shared:
    """The chats of all dialects: they share one limit, the keys, and the warnings that come once."""

    def __init__(self, deps: ProxyDeps) -> None:
        self.deps = deps
        self.keys = deps.keys or Keys(deps.server.api_keys)
        self.body_limit = int(deps.server.max_body_mb * 2**20)
        self.running = 0
        self.quotas = Quotas(deps.ledger, deps.clock)
        self.names = ModelNames(
            deps.model_name, deps.server.unknown_model, lambda: _one_version(deps), self._warn_of_alias
        )
        self._warned: set[str] = set()

    def warn(self, body: ParsedBody) -> None:
        """Log a request for a feature that is not served; one line for each feature."""
        chat = body.chat
        if chat.offered_tools and not self.deps.frontend.renders_tools:
            self._once("tools", "tools_not_shown", reason="the model's template has no tools: served without")
        for field in (*body.skipped, *(name for name in _NOT_SERVED if body.raw.get(name) is not None)):
            self._once(f"field {field}", "field_not_served", field=field)
        if any(tool["function"].get("strict") for tool in chat.offered_tools):
            self._once("strict", "field_not_served", field="tools[].function.strict")

    def _warn_of_alias(self, name: str) -> None:
        self._once(f"model {name[:100]}", "other_model_named", named=name[:100], served=self.deps.model_name)

    def _once(self, key: str, event: str, **fields: str) -> None:
        if key not in self._warned and len(self._warned) < 1000:
            self._warned.add(key)
            log.warning(event, **fields)


class _Endpoint:
    """A route that reads a body of one dialect, and answers each fault in that dialect's form."""

    def __init__(self, shared: _Shared, dialect: Dialect) -> None:
        self._shared, self._deps, self._dialect = shared, shared.deps, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, request_id = _headers_of(scope), _new_id()
        data, is_read = b"", False
        self._shared.running += 1
        try:
            if self._shared.running > self._deps.server.max_streams:
                raise RequestError("too many chats at once; try again", status=503, code="overloaded")
            caller = self._shared.keys.caller(headers.get("authorization") or self._own_key(headers))
            with self._shared.quotas.running(caller):
                data = await read_body(
                    scope, receive, self._shared.body_limit, timeout_s=self._deps.server.body_timeout_s
                )
                is_read = True
                body = self._read(data) if len(data) < _INLINE_BYTES else await asyncio.to_thread(self._read, data)
                if has_pictures(body.chat.messages):
                    data = b""
                answering = self._answer(caller, headers, body, request_id, receive, send)
                del body  # it holds pictures in base64, until `_answer` has taken them out
                await answering
        except (RequestError, EngineError) as error:
            await _refuse(self._dialect, request_id, receive, send, error, is_read=is_read)
        except (RecursionError, TypeError) as error:
            # Templates, schemas and JSON writers recurse: the depth of a small body is their limit. orjson's is 254.
            if isinstance(error, TypeError) and "ecursion" not in str(error):
                raise
            fault = bodies.nested_too_deeply(data)
            await _refuse(self._dialect, request_id, receive, send, fault, is_read=is_read)
        except ClientGone:
            return
        except asyncio.CancelledError:
            # The stop cut the reply after `drain_s`. It is recorded, and uvicorn would log the cancellation as a fault.
            log.info("reply_cut_by_stop")
        finally:
            self._shared.running -= 1

    def _own_key(self, headers: _Headers) -> str | None:
        """Return the key of this dialect's own header, as an Authorization header."""
        key = headers.get(self._dialect.key_header) if self._dialect.key_header else None
        return f"Bearer {key}" if key else None

    def _read(self, data: bytes) -> ParsedBody:
        return self._dialect.read(data)

    async def _answer(
        self, caller: Caller, headers: _Headers, body: ParsedBody, request_id: str, receive: Receive, send: Send
    ) -> None:
        raise NotImplementedError


class _CountRoute(_Endpoint):
    """Anthropic's count of a prompt's tokens: the prompt is rendered, and nothing is recorded."""

    def _read(self, data: bytes) -> ParsedBody:
        return messages_request.read_count(data)

    async def _answer(
        self, caller: Caller, headers: _Headers, body: ParsedBody, request_id: str, receive: Receive, send: Send
    ) -> None:
        async with self._deps.pictures.seat() as seat:
            body = await seat.take(body)
            await seat.check()
            prompt = await render(self._deps, caller, body.chat, seat.pictures)
        text = orjson.dumps({"input_tokens": len(prompt.rendered.ids)})
        await answer(send, 200, text, self._dialect.headers(request_id))


class _ChatRoute(_Endpoint):
    """A chat: one `Reply`, written as JSON or as server-sent events, or the answer to a command."""

    async def _answer(
        self, caller: Caller, headers: _Headers, body: ParsedBody, request_id: str, receive: Receive, send: Send
    ) -> None:
        only_version = self._shared.names.wanted_version(body.chat.model)
        self._shared.warn(body)
        if episode_named(headers, body.raw) is not None:
            caller = replace(caller, has_commands=False)  # an environment's words are no user's
        if (asked := commanded(self._deps, caller, headers, body)) is not None:
            await self._command(asked, body, request_id, send)
            return
        await self._shared.quotas.check_tokens(caller)
        async with self._deps.pictures.seat() as seat:
            body = await seat.take(body)
            await seat.check()
            prepared = await prepare(self._deps, caller, headers, body, seat.pictures)
            await self._reply(caller, prepared, only_version, body, receive, send)

    async def _reply(
        self,
        caller: Caller,
        prepared: Prepared,
        only_version: int | None,
        body: ParsedBody,
        receive: Receive,
        send: Send,
    ) -> None:
        reply = Reply(self._deps, prepared, only_version, id_prefix=self._dialect.id_prefix)
        work = self._stream if body.chat.stream else self._whole
        about = Asked(
            reply.reply_id,
            self._model(body),
            int(prepared.request.received_at),
            len(prepared.request.prompt_ids),
            prepared.request.sampling,
            body,
        )
        try:
            await work(reply, prepared, about, receive, send)
        finally:
            self._shared.quotas.used(caller, reply.tokens)

    async def _command(self, asked: Commanded, body: ParsedBody, request_id: str, send: Send) -> None:
        """Answer a command."""
        outcome = await answer_of(self._deps, asked)
        text = written(self._dialect, outcome, body, model=self._model(body), created=int(self._deps.clock()))
        headers = {"x-openclaw-recorded": "false", **self._dialect.headers(request_id)}
        if asked.scope.session_id is not None:
            headers["x-session-id"] = asked.scope.session_id
        await answer(send, 200, text, headers, "text/event-stream; charset=utf-8" if body.chat.stream else None)

    async def _whole(self, reply: Reply, prepared: Prepared, about: Asked, receive: Receive, send: Send) -> None:
        async def work() -> None:
            async with reply:
                async for _ in reply.steps():
                    pass
                await reply.commit()

        if not await until_gone(receive, work()):
            return
        outcome = reply.outcome()
        await answer(send, 200, self._dialect.whole(about, outcome), self._headers(reply, prepared))
        await self._deps.frontend.expect_back(prepared.rendered, outcome.message)

    async def _stream(self, reply: Reply, prepared: Prepared, about: Asked, receive: Receive, send: Send) -> None:
        events = self._dialect.events(about)
        sender = EventSender(
            send,
            headers=lambda: {"cache-control": "no-cache", "x-accel-buffering": "no", **self._headers(reply, prepared)},
            opening=events.opening(),
            keep_alive=self._dialect.keep_alive,
            is_held=lambda: reply.weight_version is None or not reply.has_arrived,
            open_after_s=_OPEN_AFTER_S,
            keepalive_s=self._deps.server.keepalive_s,
            stall_s=self._deps.server.stall_s,
        )

        def show(delta: Delta) -> None:
            if (event := events.delta(delta)) and not sender.event_at_once(event):
                reply.show_at_once(None)  # the client is slow: the next part waits for it

        async def work() -> None:
            async with reply:
                async for step in reply.steps():
                    if event := events.delta(step.delta, step.log_probs):
                        await sender.event(event)
                        reply.show_at_once(show)
                await reply.commit()
            outcome = reply.outcome()
            await sender.end(events.end(outcome))
            await self._deps.frontend.expect_back(prepared.rendered, outcome.message)

        try:
            await until_gone(receive, work(), sender.keep_alive())
        except (RequestError, EngineError) as error:
            if not sender.is_open:
                raise
            fault = error if isinstance(error, RequestError) else _as_request_error(error)
            log.warning("stream_failed", reply_id=reply.reply_id, status=fault.status, error=fault.message)
            await sender.end(events.failure(fault))

    def _headers(self, reply: Reply, prepared: Prepared) -> Mapping[str, str]:
        headers = dict(self._dialect.headers(reply.reply_id))
        if reply.weight_version is not None:
            headers["x-weight-version"] = str(reply.weight_version)
        if prepared.request.scope.session_id is not None:
            headers["x-session-id"] = prepared.request.scope.session_id
        if not reply.is_recorded:
            headers["x-openclaw-recorded"] = "false"
        return headers

    def _model(self, body: ParsedBody) -> str:
        return body.chat.model or self._deps.model_name


def _one_version(deps: ProxyDeps) -> int | None:
    """Return the version that serves everyone; None where policies have versions of their own."""
    return deps.serving.current if deps.serving.loader is None else None


def _headers_of(scope: Scope) -> _Headers:
    # A chat looks a score of names up, and `Headers` would walk its list for each.
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
    headers[PATH_EPISODE] = scope.get(PATH_EPISODE, "")
    return headers


def _new_id() -> str:
    return f"req_{uuid.uuid4().hex}"


async def _refuse(
    dialect: Dialect,
    request_id: str,
    receive: Receive,
    send: Send,
    error: RequestError | EngineError,
    *,
    is_read: bool,
) -> None:
    fault = error if isinstance(error, RequestError) else _as_request_error(error)
    headers = dict(dialect.headers(request_id))
    if fault.status == 503:
        headers["retry-after"] = str(_RETRY_AFTER_S)
    if fault.retry_after_s is not None:
        headers["retry-after"] = str(fault.retry_after_s)
    if isinstance(error, EngineRefused) and error.retry_after is not None:
        headers["retry-after"] = error.retry_after
    text = dialect.error(fault, request_id)
    if is_read:
        await answer(send, fault.status, text, headers)
    else:
        await answer_unread(receive, send, fault.status, text, headers)


def _as_request_error(error: EngineError) -> RequestError:
    if isinstance(error, EngineRefused):
        return RequestError(error.message, status=error.status, code="engine_refused")
    return RequestError("the engine is not available; try again", status=503, code="engine_unavailable")

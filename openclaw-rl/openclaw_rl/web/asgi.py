"""ASGI without layers: read a body with a limit, answer JSON, stream events with keep-alives, and stop when the client
leaves.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openclaw_rl.errors import RequestError
from openclaw_rl.web.errors import KEEP_ALIVE
from openclaw_rl.web.errors import error as wire_error


class ClientGone(Exception):
    """The client left before its request was read, so no answer is due."""


_DISCARD_BYTES, _DISCARD_S = 64 * 2**20, 2.0


async def read_body(scope: Scope, receive: Receive, limit: int, *, timeout_s: float | None = None) -> bytes:
    """Return the request's body.

    Raises RequestError: 413 as soon as the body is known to be longer than `limit` bytes, 408 when it is incomplete
    after `timeout_s`. Raises ClientGone.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_body(scope, receive, limit)
    except TimeoutError as error:
        raise RequestError(
            f"the body did not come within {timeout_s:g} s", status=408, code="request_timeout"
        ) from error


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
        if not message.get("more_body"):
            return b"".join(pieces)


def bounded(app: ASGIApp, limit: int, *, but: str) -> ASGIApp:
    """Return `app` for requests with bodies of up to `limit` bytes. Paths below `but` have their own limit."""
    # FastAPI reads a body whole, so the limit has to come before it.
    fault = _too_large(limit)
    text = wire_error(fault.message, status=fault.status, code=fault.code)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(but):
            await app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            await answer_unread(receive, send, fault.status, text)
            return
        left, is_refused = limit, False

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise _too_large(limit)
            return message

        async def answered(message: Message) -> None:
            """Pass on the app's answer, unless the body was too large."""
            nonlocal is_refused
            if left >= 0:
                await send(message)
            elif not is_refused:
                is_refused = True
                await answer_unread(receive, send, fault.status, text)

        await app(scope, counted, answered)

    return serve


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body is larger than {limit / 2**20:g} MB", status=413, code="request_too_large")


async def answer(send: Send, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
    """Send a JSON answer."""
    await send(_start(status, "application/json", {**headers, "content-length": str(len(body))}))
    await send({"type": "http.response.body", "body": body})


async def answer_unread(
    receive: Receive, send: Send, status: int, body: bytes, headers: Mapping[str, str] = {}
) -> None:
    """Answer a request whose body was not read, in a way that the client can read the answer.

    Closing the connection while the client still sends would reset it. So the answer goes first, and the rest of the
    body is discarded for `_DISCARD_S`.
    """
    headers = {**headers, "content-length": str(len(body)), "connection": "close"}
    await send(_start(status, "application/json", headers))
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            left = _DISCARD_BYTES
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    break
    await send({"type": "http.response.body", "body": b""})


async def until_gone(receive: Receive, *works: Coroutine[Any, Any, None]) -> bool:
    """Run the first of `works` and the others beside it. Return False when the client disconnected; all are cancelled.

    The others end with the first. Raises the exception of the first.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work, *rest = (asyncio.ensure_future(work) for work in works)
    gone = asyncio.ensure_future(watch())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))
            if work.cancelled():
                return False
        work.result()
        for task in rest:
            if task.done():
                task.result()
        return True
    finally:
        for task in (work, gone, *rest):
            task.cancel()
        await asyncio.gather(work, gone, *rest, return_exceptions=True)


class EventSender:
    """Response of one stream. The head goes out with the first event, or after `open_after_s` without an event.

    So an early refusal still has its own status, and the client gets a head soon.
    """

    def __init__(
        self,
        send: Send,
        *,
        headers: Callable[[], Mapping[str, str]],
        opening: bytes,
        is_held: Callable[[], bool],
        open_after_s: float,
        keepalive_s: float,
    ) -> None:
        """is_held: the reply waits for a version. The head names the version, so it then waits up to `keepalive_s`."""
        self._send, self._headers, self._opening, self._is_held = send, headers, opening, is_held
        self._open_after_s, self._keepalive_s = open_after_s, keepalive_s
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self.is_open = False
        self._is_over = False

    async def event(self, data: bytes) -> None:
        if not self.is_open:
            await self._open(data)
            return
        self._sent_at = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """Send the last events and end the stream."""
        self._is_over = True
        if not self.is_open:
            await self._open(b"")
        await self._send({"type": "http.response.body", "body": data})

    async def keep_alive(self) -> None:
        """Open the stream in time, then send keep-alives while the reply is silent. Runs beside the reply."""
        await asyncio.sleep(self._open_after_s)
        while self._is_held() and self._loop.time() - self._sent_at < self._keepalive_s:  # noqa: ASYNC110 (rare, short)
            await asyncio.sleep(self._open_after_s)
        if not self.is_open and not self._is_over:
            await self._open(b"")
        while not self._is_over:
            silent_s = self._loop.time() - self._sent_at
            if silent_s >= self._keepalive_s:
                await self.event(KEEP_ALIVE)
                silent_s = 0.0
            await asyncio.sleep(self._keepalive_s - silent_s)

    async def _open(self, data: bytes) -> None:
        self.is_open = True
        self._sent_at = self._loop.time()
        # `is_open` was set first: another task that runs during this await must not open the stream again.
        await self._send(_start(200, "text/event-stream; charset=utf-8", self._headers()))
        await self._send({"type": "http.response.body", "body": self._opening + data, "more_body": True})


def _start(status: int, content_type: str, headers: Mapping[str, str]) -> dict[str, Any]:
    pairs = [(b"content-type", content_type.encode())]
    pairs += [(name.encode("latin-1"), _header_value(value)) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _header_value(text: str) -> bytes:
    """Return a header value. A session id may come from a body and hold any character, line breaks included."""
    return "".join(char if char.isprintable() else " " for char in text).strip().encode("latin-1", "replace")


async def run_to_completion(work: Coroutine[Any, Any, Any]) -> None:
    """Run `work` to its end even when the caller is cancelled meanwhile; raise CancelledError afterwards."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise

"""Request bodies within a limit, JSON answers, and OpenAI's error form, on plain ASGI."""

import asyncio
import contextlib
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openclaw_rl.errors import RequestError
from openclaw_rl.web.client_gone import ClientGone

_DISCARD_BYTES, _DISCARD_S = 64 * 2**20, 2.0
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's names of errors."""
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


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

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(but):
            await app(scope, receive, send)
            return
        text = error_for(scope["path"], fault.message, status=fault.status, code=fault.code)
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


def place_name(place: Iterable[str | int]) -> str:
    """Return the name of a place in a body, as `messages[0].content`."""
    name = ""
    for part in place:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def nested_too_deeply(data: bytes) -> RequestError:
    """Return the refusal of a JSON body that is nested too deeply; it names the field with the deepest value."""
    # The text is searched, because a parser may have refused it.
    depth = most = 0
    last, field = b"", b""
    for found in _STRING_OR_BRACKET.finditer(data):
        match found[0]:
            case b"[" | b"{":
                depth += 1
                if depth > most:
                    most, field = depth, last
            case b"]" | b"}":
                depth -= 1
            case text if depth == 1:
                last = text  # in front of a bracket it is that value's key
    if not field:
        return RequestError("the body is nested too deeply", code="invalid_json")
    name = field[1:-1].decode("utf-8", "replace")
    return RequestError(f"{name}: it is nested too deeply", param=name)


async def answer(
    send: Send, status: int, body: bytes, headers: Mapping[str, str] = {}, content_type: str | None = None
) -> None:
    """Send an answer at once; JSON unless `content_type` says otherwise."""
    headers = {**headers, "content-length": str(len(body))}
    await send(response_start(status, content_type or "application/json", headers))
    await send({"type": "http.response.body", "body": body})


async def answer_unread(
    receive: Receive, send: Send, status: int, body: bytes, headers: Mapping[str, str] = {}
) -> None:
    """Answer a request whose body was not read, in a way that the client can read the answer.

    Closing the connection while the client still sends would reset it. So the answer goes first, and the rest of the
    body is discarded for `_DISCARD_S`.
    """
    headers = {**headers, "content-length": str(len(body)), "connection": "close"}
    await send(response_start(status, "application/json", headers))
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


def response_start(status: int, content_type: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the ASGI message that opens a response."""
    pairs = [(b"content-type", content_type.encode())]
    pairs += [(name.encode("latin-1"), _header_value(value)) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _header_value(text: str) -> bytes:
    """Return a header value. A session id may come from a body and hold any character, line breaks included."""
    return "".join(char if char.isprintable() else " " for char in text).strip().encode("latin-1", "replace")


def error(message: str, *, status: int, code: str | None, param: str | None = None) -> bytes:
    """Return an error as a body in OpenAI's form."""
    kinds = {401: "authentication_error", 413: "invalid_request_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def anthropic_error(message: str, *, status: int, request_id: str) -> bytes:
    """Return an error as a body in Anthropic's form."""
    kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    return orjson.dumps(body)


def error_for(path: str, message: str, *, status: int, code: str | None, param: str | None = None) -> bytes:
    """Return an error in the form of the API that a path belongs to."""
    if path.removeprefix("/v1").startswith("/messages"):
        return anthropic_error(message, status=status, request_id=f"req_{uuid.uuid4().hex}")
    return error(message, status=status, code=code, param=param)


def error_event(message: str, *, status: int, code: str | None, param: str | None = None) -> bytes:
    """Return an error as an event of a stream that has begun."""
    # No [DONE] follows it: the client must not take the reply for complete.
    return b"data: " + error(message, status=status, code=code, param=param) + b"\n\n"

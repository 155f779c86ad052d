"""POST a JSON body and read the answer's server-sent events: HTTP/1.1 over one asyncio connection, nothing more.

Why not the shared httpx client: a reply is one event per token, and httpx costs 80–120 µs of CPU for each, this 16–38
µs. Everything else goes through httpx. One connection per stream: closing it is what tells the engine that nobody
listens any more.

Promises: an event is handed out as it arrives; a silence longer than `silence_s` ends in `EngineGone`; so does every
broken connection.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import orjson

from openclaw_rl.errors import EngineGone, EngineRefused

_LIMIT = 16 * 2**20
"""Longest line or error body accepted; prompt log-probs of a long text come in one event."""


class EventStream:
    """One request. `async with` opens and closes it; iterate `events()` once."""

    def __init__(self, url: str, body: bytes, *, connect_s: float, silence_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._tls = parts.hostname or "127.0.0.1", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        head = f"POST {parts.path or '/'} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
        head += f"accept: text/event-stream\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._request = head.encode("ascii") + body
        self._connect_s, self._silence_s = connect_s, silence_s
        self._timed_out = False
        self._chunked = False
        self._length: int | None = None

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._connect_s):
                self._reader, self._writer = await asyncio.open_connection(
                    self._host, self._port, limit=_LIMIT, ssl=ssl.create_default_context() if self._tls else None
                )
        except (OSError, TimeoutError) as error:
            raise EngineGone(f"cannot connect to {self._host}:{self._port}: {error!r}") from error
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._watchdog = self._loop.call_later(self._silence_s, self._check_silence)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.cancel()
        self._writer.transport.abort()  # not close(): nothing is left to send, and nobody waits for a peer that hangs

    def _check_silence(self) -> None:
        # One timer per stream that looks back, instead of arming a timeout for every token.
        left = self._heard_at + self._silence_s - self._loop.time()
        if left <= 0:
            self._timed_out = True
            self._writer.transport.abort()
        else:
            self._watchdog = self._loop.call_later(left, self._check_silence)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The data of each event. Raises EngineRefused for a 4xx, EngineGone for anything else that is no event
        stream.
        """
        try:
            self._writer.write(self._request)
            await self._writer.drain()
            status = await self._read_head()
            if status != 200:
                raise _refusal(status, await self._read_error())
            rest = b""
            while piece := await self._read_piece():
                self._heard_at = self._loop.time()
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            what = f"silent for {self._silence_s:g} s" if self._timed_out else f"broke off: {error!r}"
            raise EngineGone(f"engine {what}") from error
        if self._timed_out:
            raise EngineGone(f"engine silent for {self._silence_s:g} s")

    async def _read_head(self) -> int:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        for line in lines[1:]:
            name, _, value = line.partition(":")
            match name.strip().lower():
                case "transfer-encoding":
                    self._chunked = "chunked" in value.lower()
                case "content-length":
                    self._length = int(value)
        return int(lines[0].partition(" ")[2][:3])  # no number: ValueError, as for a chunk size

    async def _read_piece(self) -> bytes:
        """What arrived next of the body; empty at its end."""
        if not self._chunked:
            return await self._reader.read(65536)
        size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def _read_error(self) -> bytes:
        if self._length is not None:
            return await self._reader.readexactly(min(self._length, _LIMIT))
        body = b""
        while len(body) < _LIMIT and (piece := await self._read_piece()):
            body += piece
        return body


def _refusal(status: int, body: bytes) -> EngineRefused | EngineGone:
    message = error_message(body)
    if 400 <= status < 500:
        return EngineRefused(message, status=status)
    return EngineGone(f"engine answered {status}: {message}")


def error_message(body: bytes) -> str:
    """The human part of an engine's error body, whatever its form."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:500].decode("utf-8", "replace")
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict):
        error = error.get("message", error)
    return error if isinstance(error, str) else str(error)

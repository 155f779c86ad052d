"""POST a JSON body and read the answer's server-sent events: HTTP/1.1 over one connection, nothing more.

Why not the shared httpx client: a reply is one event per token, and httpx costs 80–120 µs of CPU for each, this a
fraction of it. Everything else goes through httpx. One connection per stream: closing it is what tells the engine that
nobody listens any more. Connections are opened before they are needed (`Connections.refill`), since the first token
waits for them.

Promises: an event is handed out as it arrives; a silence longer than `silence_s` ends in `EngineGone`; so does every
broken connection. A reader that falls behind stops the connection, not the memory.
"""

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

import orjson

from openclaw_rl.errors import EngineGone, EngineRefused

_MAX_HEAD, _MAX_ERROR = 64 * 2**10, 2**20
_MAX_LINE = 32 * 2**20
"""Of one event, or one chunk: an engine that never ends a line does not fill our memory."""
_MAX_WAITING = 1024
"""Events read ahead of the reader; above, the connection is not read until half of them are taken."""
_IN_A_ROW = 4
"""Events handed out before the loop has its turn: where many wait, a reader that never waits itself would keep
everybody else waiting, and go on writing to a client whose end the loop has not told it yet."""
_MAX_SPARE, _SPARE_S = 32, 30.0
"""Connections opened ahead, and how long one is trusted to be there; a request that finds none opens its own."""


class Connections:
    """To one engine: made ahead of time or on demand, used once, closed."""

    def __init__(self, url: str, *, connect_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._tls = parts.hostname or "127.0.0.1", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self.host_header, self.path = parts.netloc, parts.path or "/"
        self._connect_s = connect_s
        self._spare: deque[tuple[asyncio.Transport, _ResponseProtocol]] = deque()

    @property
    def spare(self) -> int:
        """Open ones that wait for a stream."""
        self._drop_dead()
        return len(self._spare)

    async def refill(self) -> None:
        """A stream took one and is answered: open one for the next. Says nothing of failures: that one will."""
        if self.spare < _MAX_SPARE:
            with contextlib.suppress(EngineGone):
                self._spare.append(await self._open())

    async def take(self) -> "tuple[asyncio.Transport, _ResponseProtocol]":
        """Raises EngineGone."""
        return self._spare.popleft() if self.spare else await self._open()

    def close(self) -> None:
        while self._spare:
            self._spare.popleft()[0].abort()

    async def _open(self) -> "tuple[asyncio.Transport, _ResponseProtocol]":
        tls = ssl.create_default_context() if self._tls else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                transport, answer = await loop.create_connection(_ResponseProtocol, self._host, self._port, ssl=tls)
        except (OSError, TimeoutError) as error:
            raise EngineGone(f"cannot connect to {self._host}:{self._port}: {error!r}") from error
        return transport, answer

    def _drop_dead(self) -> None:
        """The oldest stand first."""
        oldest = asyncio.get_running_loop().time() - _SPARE_S
        while self._spare and self._spare[0][1].heard_at < oldest:
            self._spare.popleft()[0].abort()
        if any(answer.is_over for _, answer in self._spare):
            self._spare = deque(pair for pair in self._spare if not pair[1].is_over)


class EventStream:
    """One request. `async with` opens and closes it; iterate `events()` once."""

    def __init__(self, connections: Connections, body: bytes, *, silence_s: float) -> None:
        head = f"POST {connections.path} HTTP/1.1\r\nhost: {connections.host_header}\r\nconnection: close\r\n"
        head += f"accept: text/event-stream\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._request = head.encode("ascii") + body
        self._connections, self._silence_s = connections, silence_s
        self._timed_out = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._transport, self._answer = await self._connections.take()
        self._answer.heard_at = self._loop.time()
        self._watchdog = self._loop.call_later(self._silence_s, self._check_silence)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.cancel()
        self._transport.abort()  # not close(): nothing is left to send, and nobody waits for a peer that hangs

    def _check_silence(self) -> None:
        # One timer per stream that looks back, instead of arming a timeout for every token.
        if self._answer.is_paused:  # it is we who do not listen
            self._answer.heard_at = self._loop.time()
        left = self._answer.heard_at + self._silence_s - self._loop.time()
        if left <= 0:
            self._timed_out = True
            self._transport.abort()
        else:
            self._watchdog = self._loop.call_later(left, self._check_silence)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The data of each event. Raises EngineRefused for a 4xx, EngineGone for anything that is no event stream."""
        answer = self._answer
        self._transport.write(self._request)
        waiting = answer.waiting
        while True:
            in_a_row = 0
            while waiting:
                if in_a_row == _IN_A_ROW:
                    in_a_row = 0
                    await asyncio.sleep(0)
                in_a_row += 1
                yield waiting.popleft()
                if answer.is_paused and len(waiting) < _MAX_WAITING // 2:
                    answer.resume()
            if self._timed_out:
                raise EngineGone(f"engine silent for {self._silence_s:g} s")
            if answer.fault is not None:
                raise answer.fault
            if answer.is_over:
                return
            await answer.news(self._loop)


class _ResponseProtocol(asyncio.Protocol):
    """Parses the answer as it arrives."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.fault: EngineRefused | EngineGone | None = None
        self.is_over = False
        """The body has ended; with a fault, or in good order."""
        self.is_paused = False
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self._reader: asyncio.Future[None] | None = None
        self._status = 0
        self._is_chunked = False
        self._length: int | None = None
        self._retry_after: str | None = None
        self._raw = b""
        """Bytes not yet parsed: of the head, then of a chunk."""
        self._line = b""
        """An event's line that has not ended yet, or an error's body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        try:
            self._parse(self._raw + data if self._raw else data)
        except ValueError as error:
            self._fail(f"engine sent what is no HTTP: {error}")
        if len(self.waiting) > _MAX_WAITING and not self.is_paused:
            self.is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over:
            # Without chunks and without a length, the end of the connection is the end of the body.
            if exc is None and self._status and not self._is_chunked and self._length is None:
                self._end()
            else:
                self._fail(f"engine broke off: {exc!r}")
        self._wake()

    def resume(self) -> None:
        self.is_paused = False
        self._transport.resume_reading()

    async def news(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until something changed."""
        self._reader = loop.create_future()
        await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _parse(self, data: bytes) -> None:
        if not self._status:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self._raw = head
                if len(head) > _MAX_HEAD:
                    raise ValueError("a head without end")
                return
            self._read_head(head)
        if self.is_over:
            return
        if self._is_chunked:
            self._read_chunks(data)
        else:
            self._raw = b""
            self._read_body(data)

    def _read_head(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        for line in lines[1:]:
            name, _, value = line.partition(":")
            match name.strip().lower():
                case "transfer-encoding":
                    self._is_chunked = "chunked" in value.lower()
                case "content-length":
                    self._length = _number(value, "0123456789", 10)
                case "retry-after":
                    self._retry_after = value.strip()
        self._status = _number(lines[0].partition(" ")[2][:3], "0123456789", 10)
        if self._status < 100:
            raise ValueError("a status that is none")

    def _read_chunks(self, data: bytes) -> None:
        at = 0
        while (end := data.find(b"\r\n", at)) >= 0:
            size = _number(data[at:end].partition(b";")[0].decode("latin-1"), "0123456789abcdef", 16)
            if size == 0:
                self._end()
                break
            start, after = end + 2, end + 2 + size
            if len(data) < after + 2:
                break
            self._read_body(data[start:after])
            at = after + 2
        self._raw = data[at:]
        if len(self._raw) > _MAX_LINE:
            raise ValueError("a chunk without end")

    def _read_body(self, data: bytes) -> None:
        if self._length is not None and not self._is_chunked:
            data = data[: self._length]
        if self._status == 200:
            *lines, self._line = (self._line + data).split(b"\n")
            if len(self._line) > _MAX_LINE:
                raise ValueError("a line without end")
            for line in lines:
                if line[:5] == b"data:":
                    self.waiting.append(line[5:].strip())
        elif len(self._line) < _MAX_ERROR:
            self._line += data
        if self._length is not None and not self._is_chunked:
            self._length -= len(data)
            if self._length <= 0:
                self._end()

    def _end(self) -> None:
        self.is_over = True
        if self._status != 200:
            self.fault = _refusal(self._status, self._line, self._retry_after)

    def _fail(self, message: str) -> None:
        self.is_over = True
        self.fault = EngineGone(message)


def _number(text: str, digits: str, base: int) -> int:
    """`int` takes signs, blanks and underscores too, and a chunk of a negative size would be read for ever."""
    text = text.strip().lower()
    if not text or len(text) > 16 or text.strip(digits):
        raise ValueError(f"no number: {text[:20]!r}")
    return int(text, base)


def _refusal(status: int, body: bytes, retry_after: str | None) -> EngineRefused | EngineGone:
    message = error_message(body)
    if 400 <= status < 500:
        return EngineRefused(message, status=status, retry_after=retry_after)
    return EngineGone(f"engine answered {status}: {message}")


def error_message(body: bytes) -> str:
    """The human part of an engine's error body, whatever its form."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:500].decode("utf-8", "replace")
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict):
        error = error.get("message", error.get("error_message", error))  # the second: of SGLang's adapters
    return error if isinstance(error, str) else str(error)

"""Client of server-sent events: POST a JSON body over one HTTP/1.1 connection, and read the events of the response.

Each stream has a connection of its own: closing it aborts the request on the engine. `Connections.refill` opens
connections ahead, because the first token waits for them.

Promises: the reader gets an event as it arrives; a reader that waits can take it in a function of its own, without a
turn of the event loop. A silence longer than `silence_s` ends in `EngineGone`; so does every
broken connection. A reader that falls behind stops the connection, so that memory stays bounded. A body in pieces is
sent as the engine takes it.
"""

# Not the shared httpx client: a reply is one event per token, and httpx costs 80–120 µs of CPU for each event, this
# module a fraction of that. All other calls go through httpx.

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

import orjson
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from openclaw_rl.errors import EngineFaulty, EngineGone, EngineRefused
from openclaw_rl.types.pictures import without_data

_MAX_HEAD, _MAX_ERROR = 64 * 2**10, 2**20
_MAX_LINE = 32 * 2**20
"""Size limit of one event, and of the bytes between two body parts: an engine that never ends a line is cut off."""
MOST_WORDS = 2000
"""Characters of an engine's error that are kept: they go into the log, the status and a client's error."""
_MAX_WAITING = 1024
"""Limit of the events read ahead; above it, the connection is not read until the reader has taken half of them."""
_IN_A_ROW = 4
"""Events that a reader gets, or is offered, before other tasks run. A reader with many waiting events never waits
itself: it would stop the other tasks, and go on writing to a client that has disconnected."""
TAKES_S = 60.0
"""Longest time in which an engine takes no byte of a large body."""
_CHUNK = 2**18
_MAX_SPARE, _SPARE_S = 32, 30.0
"""Limits of the connections opened ahead: their number and their age. A request without a spare one opens its own."""


class Connections:
    """Connections to one engine: opened ahead or on demand, used once, closed."""

    def __init__(self, url: str, *, connect_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._tls = parts.hostname or "127.0.0.1", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self.host_header, self.path = parts.netloc, parts.path or "/"
        self._connect_s = connect_s
        self._spare: deque[tuple[asyncio.Transport, _ResponseProtocol]] = deque()

    @property
    def spare(self) -> int:
        """Number of open connections that wait for a stream."""
        self._drop_dead()
        return len(self._spare)

    async def refill(self) -> None:
        """Open a connection for the next stream, after a stream took one."""
        # A failure is not reported here: the next stream will meet it.
        if self.spare < _MAX_SPARE:
            with contextlib.suppress(EngineGone):
                opened = await self._open()
                if self.spare < _MAX_SPARE:  # others were opened meanwhile
                    self._spare.append(opened)
                else:
                    opened[0].abort()

    async def take(self) -> "tuple[asyncio.Transport, _ResponseProtocol]":
        """Return an open connection. Raises EngineGone."""
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
        # The oldest come first.
        oldest = asyncio.get_running_loop().time() - _SPARE_S
        while self._spare and self._spare[0][1].heard_at < oldest:
            self._spare.popleft()[0].abort()
        if any(answer.is_over for _, answer in self._spare):
            self._spare = deque(pair for pair in self._spare if not pair[1].is_over)


class EventStream:
    """One request. `async with` opens and closes it; iterate `events()` once."""

    def __init__(
        self,
        connections: Connections,
        body: bytes | AsyncGenerator[bytes, None],
        *,
        silence_s: float,
        offer: Callable[[bytes], bool] | None = None,
    ) -> None:
        """body: pieces of a large one are asked for as the engine takes them. offer: gets the data of an event that
        arrives while the reader waits. It returns False for an event that it leaves to the reader.
        """
        length = f"content-length: {len(body)}" if isinstance(body, bytes) else "transfer-encoding: chunked"
        head = f"POST {connections.path} HTTP/1.1\r\nhost: {connections.host_header}\r\nconnection: close\r\n"
        head += f"accept: text/event-stream\r\ncontent-type: application/json\r\n{length}\r\n\r\n"
        self._request = head.encode("ascii") + (body if isinstance(body, bytes) else b"")
        self._pieces = None if isinstance(body, bytes) else body
        self._connections, self._silence_s, self._offer = connections, silence_s, offer
        self._timed_out = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._transport, self._answer = await self._connections.take()
        self._answer.heard_at, self._answer.offer = self._loop.time(), self._offer
        self._watchdog = self._loop.call_later(self._silence_s, self._check_silence)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.cancel()
        self._answer.offer = None
        self._transport.abort()  # not close(): no bytes are left to send, and a peer that hangs must not delay us

    def break_off(self) -> None:
        """End in EngineGone at once: the engine is known to be gone, though its connection stands."""
        self._transport.abort()

    def _check_silence(self) -> None:
        # One timer per stream that looks back, instead of arming a timeout for every token.
        if self._answer.is_paused:  # our reader, not the engine, is late
            self._answer.heard_at = self._loop.time()
        left = self._answer.heard_at + self._silence_s - self._loop.time()
        if left <= 0:
            self._timed_out = True
            self._transport.abort()
        else:
            self._watchdog = self._loop.call_later(left, self._check_silence)

    async def _send(self, piece: bytes) -> None:
        """Send a piece of the body in chunks, each when the engine has taken the last. Raises EngineGone."""
        answer = self._answer
        for at in range(0, len(piece), _CHUNK):
            answer.heard_at = self._loop.time()
            try:
                async with asyncio.timeout(TAKES_S):
                    await answer.room(self._loop)
            except TimeoutError as error:
                raise EngineGone(f"engine took no byte for {TAKES_S:g} s") from error
            if answer.is_over:  # it has answered already, or is gone
                return
            chunk = piece[at : at + _CHUNK]
            self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the data of each event. Raises EngineRefused for a 4xx, EngineGone for any other failure."""
        answer = self._answer
        self._transport.write(self._request)
        if self._pieces is not None:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    await self._send(piece)
                    del piece
            if not answer.is_over:
                self._transport.write(b"0\r\n\r\n")
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
    """Parser of one response, fed by the transport. llhttp reads the HTTP, and calls the `on_…` methods."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.offer: Callable[[bytes], bool] | None = None
        self._offers = 0
        """Events of these bytes that may still be offered."""
        self.fault: Exception | None = None
        self.is_over = False
        """The body has ended, in good order or with a fault."""
        self.is_paused = False
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._is_full = False
        """The transport has bytes that the engine has not taken."""
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._status = 0
        """0 until the head is complete."""
        self._ends_with_connection = True
        """The head gives neither a length nor chunks."""
        self._retry_after: str | None = None
        self._bytes_without_body = 0
        self._line = bytearray()
        """The unfinished line of an event, or an error's body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        if self.is_over or self._parser is None:
            return
        self._bytes_without_body += len(data)
        if self.offer is not None and not self.waiting and self._reader is not None and not self._reader.done():
            self._offers = _IN_A_ROW
        try:
            self._parser.feed_data(data)
            # llhttp keeps a header that has not ended, in the head or behind the last chunk.
            if self._bytes_without_body > (_MAX_LINE if self._status else _MAX_HEAD):
                raise ValueError("a head without end" if not self._status else "a chunk without end")
        except (HttpParserError, HttpParserUpgrade, ValueError) as error:
            self._fail(f"engine sent what is no HTTP: {error.__context__ or error}")
        if len(self.waiting) > _MAX_WAITING and not self.is_paused:
            self.is_paused = True
            self._transport.pause_reading()
        self._offers = 0
        if self.waiting or self.is_over:
            self._wake()
            self._wake_writer()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._status and self._ends_with_connection:
            self.on_message_complete()
        else:
            self._fail(f"engine broke off: {exc!r}")
        self._parser = None  # it refers to this object: the pair would wait for the cyclic collector
        self._wake()
        self._wake_writer()

    def resume(self) -> None:
        self.is_paused = False
        self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake_writer()

    async def room(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until the transport has sent what it got, or the response is over."""
        if self._is_full and not self.is_over:
            self._writer = loop.create_future()
            await self._writer

    def _wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    async def news(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until the transport delivers bytes or ends."""
        self._reader = loop.create_future()
        await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"transfer-encoding":
                self._ends_with_connection = not value.lower().rstrip().endswith(b"chunked")
            case b"content-length":
                self._ends_with_connection = False
            case b"retry-after":
                self._retry_after = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        if self._parser is not None and not self._status:
            self._status, self._bytes_without_body = self._parser.get_status_code(), 0

    def on_body(self, data: bytes) -> None:
        if self.is_over:
            return
        self._bytes_without_body = 0
        if self._status != 200:
            if len(self._line) < _MAX_ERROR:
                self._line += data
            return
        if not self._line and data[:5] == b"data:" and data.find(b"\n") == len(data) - 2 and data[-1:] == b"\n":
            self._put(data[5:-2].strip())  # one whole event, as usual
            return
        if self._line:
            self._line += data
            if b"\n" not in data:
                if len(self._line) > _MAX_LINE:
                    raise ValueError("a line without end")
                return
            data = bytes(self._line)
            self._line.clear()
        *lines, rest = data.split(b"\n")
        self._line += rest
        for line in lines:
            if line[:5] == b"data:":
                self._put(line[5:].strip())

    def _put(self, event: bytes) -> None:
        if not self._offers or not self._taken(event):
            self.waiting.append(event)

    def _taken(self, event: bytes) -> bool:
        """Offer an event to the reader. Once it takes none, the rest of these bytes waits, so that order is kept."""
        assert self.offer is not None
        self._offers -= 1
        try:
            is_taken = self.offer(event)
        except Exception as error:  # a bug: it must end the reader, not the connection
            self.is_over, self.fault, is_taken = True, error, True
        if not is_taken:
            self._offers = 0
        return is_taken

    def on_message_complete(self) -> None:
        if not self.is_over:
            self.is_over = True
            if self._status != 200:
                self.fault = _refusal(self._status, bytes(self._line), self._retry_after)

    def _fail(self, message: str) -> None:
        if not self.is_over:
            self.is_over = True
            self.fault = EngineGone(message)


def _refusal(status: int, body: bytes, retry_after: str | None) -> EngineRefused | EngineFaulty:
    message = error_message(body)
    if 400 <= status < 500:
        return EngineRefused(message, status=status, retry_after=retry_after)
    return EngineFaulty(f"engine answered {status}: {message}")


def error_message(body: bytes) -> str:
    """Return the message of an engine's error body in any of its forms."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return without_data(body.decode("utf-8", "replace"))[:MOST_WORDS]
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict):
        error = error.get("message", error.get("error_message", error))  # the second: of SGLang's adapters
    return without_data(error if isinstance(error, str) else str(error))[:MOST_WORDS]

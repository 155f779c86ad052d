"""Server-sent events of one reply, with keep-alive comments while the reply is silent."""

import asyncio
import types
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import structlog
from starlette.types import Message, Send

from openclaw_rl.web.bodies import response_start

log = structlog.get_logger()

KEEP_ALIVE = b": keep-alive\n\n"


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
        keep_alive: bytes = KEEP_ALIVE,
        is_held: Callable[[], bool],
        open_after_s: float,
        keepalive_s: float,
        stall_s: float,
    ) -> None:
        """keep_alive: event for a client whose reply is silent.

        is_held: the reply waits for a version. The head names the version, so it then waits up to `keepalive_s`.

        stall_s: longest wait for a client that takes nothing.
        """
        self._asgi_send, self._headers, self._opening, self._is_held = send, headers, opening, is_held
        self._keep_alive = keep_alive
        self._open_after_s, self._keepalive_s, self._stall_s = open_after_s, keepalive_s, stall_s
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self.is_open = False
        self._is_over = False
        self._unsent: tuple[Generator[Any, Any, None], Any] | None = None
        """Send that waits for the client, and the future that it waits for."""

    async def event(self, data: bytes) -> None:
        if not self.is_open:
            await self._open(data)
            return
        self._sent_at = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def event_at_once(self, data: bytes) -> bool:
        """Send an event of an open stream without a wait. Return False if the client takes it only later: the next
        `event` or `end` first waits for that."""
        self._sent_at = self._loop.time()
        sending = self._asgi_send({"type": "http.response.body", "body": data, "more_body": True}).__await__()
        try:
            self._unsent = sending, next(sending)
        except StopIteration:
            return True
        return False

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
                # A client whose buffer is full gets no keep-alive. The next look comes after a whole interval.
                if self._unsent is None:
                    await self.event(self._keep_alive)
                silent_s = 0.0
            await asyncio.sleep(self._keepalive_s - silent_s)

    async def _send(self, message: Message) -> None:
        """Send a message. A client that takes nothing for `stall_s` cancels the calling task, like one that left."""
        if self._unsent is not None:
            begun, self._unsent = self._unsent, None
            await self._finish(*begun)
        # Nearly every send ends without a wait. A timer for each token would cost a seventh of the token's CPU time.
        sending = self._asgi_send(message).__await__()
        try:
            waits_for = next(sending)
        except StopIteration:
            return
        await self._finish(sending, waits_for)

    async def _finish(self, sending: Generator[Any, Any, None], waits_for: Any) -> None:
        # The reply holds a place among the streams, an engine request and a version: others wait for all three.
        try:
            async with asyncio.timeout(self._stall_s):
                await _rest_of(sending, waits_for)
        except TimeoutError:
            log.warning("client_stalled", stall_s=self._stall_s)
            raise asyncio.CancelledError("the client takes nothing") from None

    async def _open(self, data: bytes) -> None:
        self.is_open = True
        self._sent_at = self._loop.time()
        # `is_open` was set first: another task that runs during this await must not open the stream again.
        await self._send(response_start(200, "text/event-stream; charset=utf-8", self._headers()))
        await self._send({"type": "http.response.body", "body": self._opening + data, "more_body": True})


@types.coroutine
def _rest_of(begun: Generator[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Await a coroutine that ran to its first wait, for `waits_for`."""
    while True:
        try:
            came = yield waits_for
        except BaseException as error:
            go_on = partial(begun.throw, error)
        else:
            go_on = partial(begun.send, came)
        try:
            waits_for = go_on()
        except StopIteration:
            return

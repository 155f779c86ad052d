"""Faults between a stub and the server that asks it, drawn for each request; each life of a stub meets every kind.

An ASGI wrapper: 5xx are answered by it, the others happen to the bytes of the connection, below HTTP: a reset (RST),
half of a piece and then the end, or one byte after the other. What garbage is, the stub knows best.
"""

import asyncio
import itertools
import random
import socket
import struct
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from starlette.types import ASGIApp, Receive, Scope, Send

Fault = Literal["5xx", "reset", "half", "slow", "garbage"]

FORCED: dict[int, Fault] = {10: "5xx", 20: "reset", 30: "slow", 40: "half", 50: "garbage"}
"""Requests of a stub's life, by number, that meet a fault where none was drawn."""

met: ContextVar[Fault | None] = ContextVar("met", default=None)
"""The fault of the request at hand, for the stub behind the wrapper."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Share of requests that meet each fault."""

    errors: float = 0.01
    resets: float = 0.01
    halves: float = 0.005
    slow: float = 0.01
    garbage: float = 0.005

    def draw(self, chance: random.Random) -> Fault | None:
        at = chance.random()
        kinds: tuple[tuple[Fault, float], ...] = (
            ("5xx", self.errors),
            ("reset", self.resets),
            ("half", self.halves),
            ("slow", self.slow),
            ("garbage", self.garbage),
        )
        for kind, share in kinds:
            if at < share:
                return kind
            at -= share
        return None


def faulty(app: ASGIApp, rates: Rates, chance: random.Random, counts: Counter[str]) -> ASGIApp:
    """`app` with faults; `counts` says how many of each there were."""

    numbers = itertools.count(1)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] == "http"
        fault = (rates.draw(chance) or FORCED.get(next(numbers))) if is_request else None
        if fault is None:
            await app(scope, receive, send)
            return
        counts[fault] += 1
        met.set(fault)
        if fault == "5xx":
            start = {"type": "http.response.start", "status": chance.choice((500, 502, 503)), "headers": []}
            await send(start)
            await send({"type": "http.response.body", "body": b'{"error": {"message": "chaos"}}'})
            return
        if fault != "garbage":
            # uvicorn's cycle of this request; it writes through this attribute alone.
            cycle: Any = send.__self__  # type: ignore[attr-defined]
            cycle.transport = FaultyTransport(cycle.transport, fault, after=chance.randint(1, 12))
        await app(scope, receive, send)

    return serve


class FaultyTransport:
    """A connection that does something else with what is written, from the `after`-th piece on."""

    SLOW_S, EVERY_S = 2.0, 0.05

    def __init__(self, real: asyncio.Transport, fault: Fault, *, after: int) -> None:
        self._real, self._fault, self._after = real, fault, after
        self._waiting = bytearray()
        self._loop = asyncio.get_running_loop()
        self._slow_until: float | None = None
        self._is_closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def write(self, data: bytes) -> None:
        self._after -= 1
        if self._after > 0:
            self._real.write(data)
        elif self._fault == "slow":
            self._waiting += data
            if self._slow_until is None:
                self._slow_until = self._loop.time() + self.SLOW_S
                self._drip()
        elif not self._real.is_closing():
            if self._fault == "half":
                self._real.write(data[: len(data) // 2])
                self._real.close()
            else:
                reset = struct.pack("ii", 1, 0)  # an RST instead of a FIN
                self._real.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                self._real.abort()

    def close(self) -> None:
        self._is_closing = True
        if not self._waiting:
            self._real.close()

    def _drip(self) -> None:
        assert self._slow_until is not None
        if self._real.is_closing():
            return
        if self._loop.time() < self._slow_until:
            if self._waiting:
                self._real.write(bytes(self._waiting[:1]))
                del self._waiting[:1]
            self._loop.call_later(self.EVERY_S, self._drip)
            return
        self._real.write(bytes(self._waiting))
        self._waiting.clear()
        self._fault, self._after = "reset", 1 << 62  # from here on as if nothing had been
        if self._is_closing:
            self._real.close()

"""Lateness of the event loop: the delay that a chat's token would have."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_EVERY_S = 0.002


@asynccontextmanager
async def lag() -> AsyncIterator[list[float]]:
    """Collect the lateness in seconds of a timer of 2 ms while the block runs."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            late.append(time.perf_counter() - due)

    ticking = asyncio.create_task(tick())
    try:
        yield late
    finally:
        ticking.cancel()

"""How late the event loop is: what a chat's token would wait."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_EVERY_S = 0.002


@asynccontextmanager
async def lag() -> AsyncIterator[list[float]]:
    """Seconds that a timer of 2 ms came late, while the block runs."""
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

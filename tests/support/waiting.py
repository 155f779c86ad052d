"""Waiting for what other tasks do: as long as it takes on a busy machine, and not for ever."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], *, look_s: float = 0.005) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(look_s)

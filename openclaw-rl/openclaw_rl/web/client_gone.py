"""Work for a client that may leave: it is cancelled when the client disconnects, or shielded from that."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


class ClientGone(Exception):
    """The client left before its request was read, so no answer is due."""


async def until_gone(receive: Receive, *works: Coroutine[Any, Any, None]) -> bool:
    """Run the first of `works` and the others beside it. Return False when the client disconnected; all are cancelled.

    The others end with the first. Raises the exception of the first. Work that cancels itself, because the client takes
    nothing (`sse`), counts as a disconnect.
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
            if task.done() and not task.cancelled():
                task.result()
        return True
    finally:
        for task in (work, gone, *rest):
            task.cancel()
        await asyncio.gather(work, gone, *rest, return_exceptions=True)


async def run_to_completion(work: Coroutine[Any, Any, Any]) -> None:
    """Run `work` to its end even when the caller is cancelled meanwhile; raise CancelledError afterwards."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise

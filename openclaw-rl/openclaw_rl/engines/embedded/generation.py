"""The answer to `/generate` on the wire, tied to its connection: however it ends, `end` runs exactly once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import Response
from starlette.types import Receive, Scope, Send


class Generation(Response):
    """Sends what `parts` yields; stops when the client goes away.

    Not a StreamingResponse: an iterator that was never started would not run its clean-up, and a request that is not
    streamed must notice a closed connection too.
    """

    def __init__(self, parts: AsyncIterator[bytes], *, is_stream: bool, end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(media_type="text/event-stream" if is_stream else "application/json")
        del self.headers["content-length"]
        self._parts, self._end = parts, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            sending = asyncio.ensure_future(self._send(send))
            watching = asyncio.ensure_future(_gone(receive))
            try:
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            finally:
                for task in (sending, watching):
                    task.cancel()
                await asyncio.gather(sending, watching, return_exceptions=True)
        finally:
            await asyncio.shield(self._end())

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

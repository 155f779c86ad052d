"""An ASGI app on a free port, on the test's own event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Serve the app; yield its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    runner = uvicorn.Server(
        uvicorn.Config(app, log_level="error", lifespan="off", access_log=False, timeout_graceful_shutdown=1)
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(runner.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            runner.should_exit = True

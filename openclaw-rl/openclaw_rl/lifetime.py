"""The tasks and child processes of one run of the server: owned while it runs, and stopped in order.

Stop: no new leases → the trainer gives its batch back → running replies finish (`server.drain_s`) → our tasks → the
children that are left. A crash of any task climbs through the task group.
"""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from openclaw_rl.listening import HttpServer
from openclaw_rl.settings import ServerSettings
from openclaw_rl.supervisor import Child
from openclaw_rl.trainers.routes import LeaseWait

events = structlog.get_logger()


class Lifetime:
    """`stop` is set when the run is to end."""

    def __init__(self, listener: socket.socket, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        self.stop, self._listener, self._tasks = stop, listener, tasks
        self.children: list[Child] = []
        self._running: list[asyncio.Task[None]] = []

    def own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._running.append(self._tasks.create_task(work, name=name))

    def start(self, child: Child) -> None:
        self.children.append(child)
        self._tasks.create_task(child.run(), name=child.name)

    async def answer(self, app: ASGIApp, settings: ServerSettings, lease_wait: LeaseWait) -> None:
        """Answer until asked to stop, then let running replies finish."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            timeout_keep_alive=75,
        )
        server = HttpServer(config)
        serving = self._tasks.create_task(server.serve(sockets=[self._listener]), name="http")
        stopping = self._tasks.create_task(self.stop.wait(), name="stop")
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        events.info("stopping", drain_s=settings.drain_s)
        lease_wait.close()
        await asyncio.gather(*(child.stop() for child in self.children if child.name == "trainer"))
        server.should_exit = True
        await serving
        self.stop.set()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.stop_children()

    async def stop_children(self) -> None:
        await asyncio.gather(*(child.stop() for child in self.children))

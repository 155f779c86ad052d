"""Lifetime of one run of the server: its port, its tasks, its child processes, and the order in which they stop.

The port is bound and answers before the engine and the front end load (`api.app.Door`). uvicorn serves it without
signal handlers of its own.

Stop: no new leases → the trainer gives its batch back → running replies finish (`server.drain_s`) → our tasks → the
remaining children. A crash of any task climbs through the task group.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from openclaw_rl import __version__
from openclaw_rl.data_dir import Announcement, DataDir
from openclaw_rl.errors import SettingsError
from openclaw_rl.processes.supervisor import Child, ChildStatus
from openclaw_rl.server import preflight
from openclaw_rl.server.api.trainer import LeaseWait
from openclaw_rl.settings import ServerSettings, Settings

log = structlog.get_logger()


def ready_to_listen(settings: Settings) -> socket.socket:
    """Return the bound socket. Raises SettingsError with one line for each problem that would stop a start."""
    problems, listener = preflight.problems(settings), None
    try:
        listener = listen(settings)
    except SettingsError as error:
        problems.insert(0, str(error))
    if listener is None or problems:
        if listener is not None:
            listener.close()
        raise SettingsError("\n".join(problems))
    return listener


def listen(settings: Settings) -> socket.socket:
    """Return a socket that listens on `server.host` and `server.port`. Raises SettingsError."""
    # Before anything heavy starts: a port in use is an error at once.
    host, port = settings.server.host, settings.server.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise SettingsError(f"server.port: {host}:{port}: {error.strerror or error}") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Linux closes the connection of a client that takes nothing, which `close` would leave open. Accepted sockets
        # inherit the option. The reply itself ends at `stall_s`, on every system.
        stall_ms = round(1000 * (settings.server.stall_s + 30))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
    bound = listener.getsockname()[0]
    if not settings.has_keys and not ipaddress.ip_address(bound).is_loopback:
        listener.close()
        raise SettingsError(f"server.host {host!r} is {bound} here, which is not loopback: set server.api_keys first")
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: `app.run` handles signals, because the trainer stops before HTTP does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def announced(data: DataDir, url: str, *, proof_key: str) -> AsyncIterator[None]:
    """Keep `run/server.json`, in which the command line finds this server."""
    Announcement.new(data, url, version=__version__, proof_key=proof_key).write(data)
    try:
        yield
    finally:
        data.server_file.unlink(missing_ok=True)


class Lifetime:
    """Owner of a run's port, tasks and child processes. `stop` is set when the run has to end."""

    def __init__(self, listener: socket.socket, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        self.stop, self._listener, self._tasks = stop, listener, tasks
        self.children: list[Child] = []
        self._running: list[asyncio.Task[None]] = []

    def own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._running.append(self._tasks.create_task(work, name=name))

    def start(self, child: Child) -> None:
        self.children.append(child)
        self._tasks.create_task(child.run(), name=child.name)

    def statuses(self) -> list[ChildStatus]:
        return [child.status() for child in self.children]

    def open(self, app: ASGIApp, settings: ServerSettings) -> None:
        """Answer requests with this application from now on."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            timeout_keep_alive=75,
        )
        self._http = HttpServer(config)
        self._serving = self._tasks.create_task(self._http.serve(sockets=[self._listener]), name="http")

    async def answer(self, settings: ServerSettings, lease_wait: LeaseWait) -> None:
        """Run until asked to stop, then let running replies finish and stop every task and child."""
        stopping = self._tasks.create_task(self.stop.wait(), name="stop")
        await asyncio.wait((self._serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        log.info("stopping", drain_s=settings.drain_s)
        lease_wait.close()
        await asyncio.gather(*(child.stop() for child in self.children if child.name == "trainer"))
        await self._close()
        self.stop.set()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.stop_children()

    async def leave(self) -> None:
        """Stop a run that was never ready."""
        await self._close()
        await self.stop_children()

    async def _close(self) -> None:
        self._http.should_exit = True
        await self._serving

    async def stop_children(self) -> None:
        await asyncio.gather(*(child.stop() for child in self.children))

"""The server's port: bound before anything heavy starts, served under our own signals, announced when ready."""

import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn

from openclaw_rl import __version__, preflight
from openclaw_rl.data_dir import DataDir, write_json
from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import Settings


def ready_to_listen(settings: Settings) -> socket.socket:
    """Raises SettingsError that names everything a start would stumble over, one line each; nothing was started yet."""
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
    """Bind before anything heavy starts: a port in use is found out at once, and early clients wait, unrefused."""
    host, port = settings.server.host, settings.server.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise SettingsError(f"server.port: {host}:{port}: {error.strerror or error}") from error
    bound = listener.getsockname()[0]
    if not settings.server.api_keys and not ipaddress.ip_address(bound).is_loopback:
        listener.close()
        raise SettingsError(f"server.host {host!r} is {bound} here, which is not loopback: set server.api_keys first")
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: the app decides what a signal means, and in which order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def announced(data: DataDir, url: str) -> AsyncIterator[None]:
    """`run/server.json` tells the command line where this server is."""
    write_json(data.server_file, {"url": url, "version": __version__})
    try:
        yield
    finally:
        data.server_file.unlink(missing_ok=True)

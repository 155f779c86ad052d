"""Processes forked from one that has imported everything and started nothing.

Importing the proxy and torch takes seconds, a fork milliseconds. The fork server is itself a fork of the test's
process, made before that one has threads or an event loop; it only forks, waits and signals, and ends its children when
the test's process is gone.
"""

import asyncio
import gc
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Role = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Process:
    """A child; `exited` gives its exit status, negative for a signal."""

    pid: int
    exited: "asyncio.Future[int]"


class ForkServer:
    """Made by `start`, then joined to the event loop by `connect`."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._running: dict[int, Process] = {}
        self._born: asyncio.Queue[Process] = asyncio.Queue()
        self._lock = asyncio.Lock()

    @classmethod
    def start(cls, roles: Mapping[str, Role]) -> "ForkServer":
        assert threading.active_count() == 1, f"threads would be lost in a fork: {threading.enumerate()}"
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            _serve(theirs, roles)
            os._exit(0)
        theirs.close()
        return cls(ours)

    async def connect(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        self._listening = asyncio.create_task(self._listen(reader))

    async def spawn(self, role: str, log: Path, **args: Any) -> Process:
        async with self._lock:
            self._say({"role": role, "log": str(log), "args": args})
            return await self._born.get()

    def signal(self, process: Process, number: int) -> None:
        """Goes by the fork server, which knows whether the process is still its child."""
        self._say({"signal": number, "pid": process.pid})

    async def close(self) -> None:
        """Ends whatever still runs."""
        self._writer.close()
        await self._listening

    def _say(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        loop = asyncio.get_running_loop()
        while line := await reader.readline():
            message = json.loads(line)
            if "born" in message:
                process = self._running[message["born"]] = Process(message["born"], loop.create_future())
                self._born.put_nowait(process)
            else:
                self._running.pop(message["exited"]).exited.set_result(message["status"])


def _serve(channel: socket.socket, roles: Mapping[str, Role]) -> None:
    """The fork server's own loop, without threads."""
    gc.freeze()  # children do not copy what is never collected
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake)
    selector = selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    children: set[int] = set()
    unread = b""
    while True:
        for key, _ in selector.select():
            if key.fileobj is not channel:
                os.read(woken, 4096)
                continue
            data = channel.recv(65536)
            if not data:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, unread = (unread + data).split(b"\n")
            for message in map(json.loads, lines):
                if "role" in message:
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        for fd in (channel.fileno(), woken, wake, selector.fileno()):  # type: ignore[attr-defined]
                            os.close(fd)
                        _be(roles[message["role"]], message)
                    children.add(pid)
                    channel.sendall(json.dumps({"born": pid}).encode() + b"\n")
                elif message["pid"] in children:
                    os.kill(message["pid"], message["signal"])
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                exited = {"exited": pid, "status": os.waitstatus_to_exitcode(status)}
                channel.sendall(json.dumps(exited).encode() + b"\n")


def _be(role: Role, message: Mapping[str, Any]) -> None:
    """In the child: never returns."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        role(message["args"])
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)

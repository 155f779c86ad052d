"""Ports of the engine's child: those that SGLang accepts, and a new one for each start."""

import asyncio
import contextlib
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.kind import EngineKind, OnExit
from openclaw_rl.processes import command
from openclaw_rl.processes.command import HIGHEST_PORT, ChildCommand, free_port
from openclaw_rl.processes.supervisor import Child
from openclaw_rl.server import engine_processes
from openclaw_rl.server.lifecycle import Lifetime
from openclaw_rl.settings import Settings


class Probe:
    """A socket of a system whose free ports are all above SGLang's limit."""

    def __init__(self) -> None:
        self.bound = 0

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None: ...

    def bind(self, address: tuple[str, int]) -> None:
        self.bound = address[1] or 60_999

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.bound


def test_a_port_is_free_and_leaves_room_for_sglangs_own() -> None:
    for _ in range(300):
        port = free_port()
        assert port <= HIGHEST_PORT
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_system_that_gives_high_ports_alone_is_asked_for_a_low_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.socket, "socket", Probe)
    assert free_port() <= HIGHEST_PORT


PORT_TAKEN = """
import http.server, sys
port = int(sys.argv[1])
if port == int(open(sys.argv[2]).read() or 0):
    sys.exit("OSError: the port is taken")
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


async def test_an_engine_whose_port_was_taken_comes_up_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "port_taken.py").write_text(PORT_TAKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    taken = tmp_path / "taken"

    class Kind(EngineKind):
        def child(self, settings: Settings, data: Any, port: int, on_exit: OnExit) -> Child:
            if not taken.exists():
                taken.write_text(str(port))
            words = (str(port), str(taken))
            return Child(
                "engine",
                ChildCommand("port_taken", words, sys.executable),
                log_file=tmp_path / "engine.log",
                on_exit=on_exit,
            )

    monkeypatch.setattr(engine_processes, "load_kind", lambda name: Kind())
    exited = asyncio.Event()
    with contextlib.suppress(asyncio.CancelledError):
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            life = Lifetime(socket.socket(), asyncio.Event(), tasks)
            engine = await engine_processes.open_engine(  # type: ignore[arg-type]
                Settings(), None, VersionAdmission(1), life=life, engine_exited=exited
            )
            stack.push_async_callback(engine.aclose)
            first = engine.url
            await asyncio.wait_for(exited.wait(), 60)
            assert engine.url != first
            async with asyncio.timeout(60):
                while not await engine.is_healthy():
                    await asyncio.sleep(0.05)
            await life.stop_children()

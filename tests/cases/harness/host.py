"""Fork server processes. Importing the server takes seconds; a fork of a process that has imported it, milliseconds.

    python -m harness.host FOLDER    (reads one JSON object of settings a line, answers with the pid of the new server)

The host only forks; the caller ends each server that it asked for. The host ends with its standard input. A server's
wall clock (Python's `time.time`) is the machine's plus the seconds in its file `wall`, also while it runs.
"""

import asyncio
import gc
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

_START_S = 120.0


def stub_settings(url: str) -> dict[str, Any]:
    """Return the settings of a server over the stubs at `url`: one chat key, one vote a turn, no trainer of ours."""
    return {
        "server.api_keys": [{"key": "test-key", "user": "tester"}],
        "engine.kind": "url",
        "engine.url": url,
        "trainer.kind": "external",
        "judge.kind": "llm",
        "judge.url": f"{url}/v1",
        "judge.votes": 1,
        "judge.quorum": 1,
    }


@dataclass(frozen=True)
class Server:
    url: str
    data_dir: Path
    log_file: Path
    pid: int = 0

    def kill(self) -> None:
        """Send SIGKILL and wait for the end. The block that started the server may end as usual afterwards."""
        os.kill(self.pid, signal.SIGKILL)
        while _is_alive(self.pid):
            time.sleep(0.01)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def set_wall_clock(self, ahead_s: float) -> None:
        """Set the wall clock of this server, and of later ones in this folder; negative: back."""
        with _wall_file(self.log_file.parent).open("r+b") as file:
            file.write(struct.pack("d", ahead_s))

    def admin(self, path: str) -> Any:
        key = (self.data_dir / "keys" / "admin.key").read_text().strip()
        reply = httpx.get(self.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=120)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}"
        return reply.json() if "json" in reply.headers["content-type"] else reply.text


class Host:
    """A context manager."""

    def __init__(self, model_folder: Path) -> None:
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))))
        environ = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
        argv = [sys.executable, "-m", "harness.host", str(model_folder)]
        self._process = subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)

    @asynccontextmanager
    async def server(self, folder: Path, settings: Mapping[str, Any]) -> AsyncIterator[Server]:
        """Run one server with its own data directory; it ends with the block."""
        pid, server = self._fork(folder, settings, None)
        try:
            yield await asyncio.to_thread(_wait_for, server, pid)
        finally:
            await asyncio.to_thread(_end, pid)

    @contextmanager
    def running(self, folder: Path, settings: Mapping[str, Any], *, umask: int | None = None) -> Iterator[Server]:
        """Run one server without an event loop. umask: of that process."""
        pid, server = self._fork(folder, settings, umask)
        try:
            yield _wait_for(server, pid)
        finally:
            _end(pid)

    def _fork(self, folder: Path, settings: Mapping[str, Any], umask: int | None) -> tuple[int, Server]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        data_dir, log_file = folder / "data", folder / "server.log"
        folder.mkdir(exist_ok=True)
        if not _wall_file(folder).exists():
            _wall_file(folder).write_bytes(struct.pack("d", 0.0))
        tree = {"data_dir": str(data_dir), "server.port": 0, **settings}
        order = {"log": str(log_file), "wall": str(_wall_file(folder)), "settings": tree, "umask": umask}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        return pid, Server("", data_dir, log_file, pid)


def _wall_file(folder: Path) -> Path:
    return folder / "wall"


def _wait_for(server: Server, pid: int) -> Server:
    where, end = server.data_dir / "run" / "server.json", time.monotonic() + _START_S
    while time.monotonic() < end and _is_alive(pid):
        try:
            url = json.loads(where.read_text())["url"]
            if httpx.get(f"{url}/healthz", timeout=120).status_code == 200:
                return replace(server, url=str(url))
        except (OSError, ValueError, httpx.HTTPError):
            pass
        time.sleep(0.02)
    raise RuntimeError(f"the server did not come up:\n{server.log[-3000:] if server.log_file.exists() else ''}")


def _end(pid: int) -> None:
    for number, wait_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + wait_s
        if _is_alive(pid):
            os.kill(pid, number)
        while _is_alive(pid):
            if time.monotonic() > end:
                break
            time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class _WallClock:
    def __init__(self) -> None:
        self._true, self._ahead = time.time, struct.pack("d", 0.0)

    def follow(self, file: Path) -> None:
        with file.open("rb") as opened:
            self._ahead = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)  # type: ignore[assignment]

    def __call__(self) -> float:
        return self._true() + float(struct.unpack_from("d", self._ahead)[0])


def _serve() -> None:
    wall = time.time = _WallClock()  # type: ignore[assignment]  # before anybody takes it for a default
    from openclaw_rl.errors import OpenClawRLError
    from openclaw_rl.proxy.frontend import FrontEnd
    from openclaw_rl.server import app
    from openclaw_rl.settings import ModelSettings, load

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the servers: let the kernel
    frontend = FrontEnd(ModelSettings(reasoning_parser="qwen3", tool_call_parser="qwen25"), Path(sys.argv[1]))
    gc.collect()
    gc.freeze()  # a server collects at its start: it would copy every page that holds an object
    for line in sys.stdin:
        order = json.loads(line)
        if pid := os.fork():
            print(pid, flush=True)  # noqa: T201
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        wall.follow(Path(order["wall"]))
        if order["umask"] is not None:
            os.umask(order["umask"])
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0), os.dup2(log, 1), os.dup2(log, 2)
        status = 1
        try:
            asyncio.run(app.run(load(None, order["settings"], {}), frontend=frontend))
            status = 0
        except OpenClawRLError as error:
            print(error, flush=True)  # noqa: T201
        finally:
            os._exit(status)


if __name__ == "__main__":
    _serve()

"""A real `openclaw-rl serve` or the stub engine in its own process, for end-to-end scripts, kill tests, benchmarks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

_STUB_START_S = 300.0


@contextmanager
def running_stub(folder: Path, *flags: str) -> Iterator[str]:
    """Run the stub engine with these flags of `python -m openclaw_rl.testing`; yield its URL."""
    where = folder / "engine.json"
    where.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "openclaw_rl.testing", "--port-file", str(where), *flags]
    with subprocess.Popen(argv, env=os.environ | {"PYTHONSAFEPATH": "1"}) as process:
        try:
            end = time.monotonic() + _STUB_START_S
            while not where.is_file():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the stub engine did not start")
                time.sleep(0.05)
            yield json.loads(where.read_text())["url"]
        finally:
            process.terminate()


def engine_flags(url: str, settings: Mapping[str, str] | None = None) -> list[str]:
    """Return the flags of a server beside an engine at this URL: no trainer of its own, and these settings."""
    chosen = {"engine.kind": "url", "engine.url": url, "trainer.kind": "external", **(settings or {})}
    return [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]


class RunningServer:
    """A server process: start, call, kill, restart. As a context manager it ends only the process that it started."""

    def __init__(
        self,
        data_dir: Path,
        args: Sequence[str] = (),
        *,
        start_s: float = 300.0,
        launch: Sequence[str] = (sys.executable, "-m", "openclaw_rl", "serve"),
        must_be_ok: bool = True,
    ) -> None:
        """launch: another command that takes the flags of `openclaw-rl serve`, for example a launch script.

        must_be_ok: `start` waits until `/healthz` is ok. False for a server whose version comes later from a trainer:
        it holds its chats until then.
        """
        self.data_dir, self._must_be_ok = data_dir, must_be_ok
        self._launch, self._args, self._start_s = list(launch), list(args), start_s
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        # One client for all calls: each would read some 140 certificates, 50 ms of CPU. It keeps no connection, because
        # the server may be killed between two calls.
        self._http = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until `/healthz` is ok, or until it answers if it need not be ok."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        where = self.data_dir / "run" / "server.json"
        where.unlink(missing_ok=True)
        argv = [*self._launch, "--data-dir", str(self.data_dir), "--port", "0", *self._args]
        environ = os.environ | {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
        with (self.data_dir / "server.log").open("ab") as out:
            self.process = subprocess.Popen(argv, env=environ, stdout=out, stderr=out)
        end = time.monotonic() + self._start_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                self.url = json.loads(where.read_text())["url"]
                if self._http.get(f"{self.url}/healthz", timeout=5).json()["status"] == "ok" or not self._must_be_ok:
                    return
            except (OSError, ValueError, KeyError, httpx.HTTPError):
                pass
            time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"the server did not come up:\n{(self.data_dir / 'server.log').read_text()[-4000:]}")

    def stop(self) -> None:
        """Send SIGTERM and wait."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def kill(self) -> None:
        """Send SIGKILL and wait. The server's children end by their lifeline."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def admin(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call a route with the admin key; return its JSON. Raises httpx.HTTPError."""
        key = (self.data_dir / "keys" / "admin.key").read_text().strip()
        reply = self._http.request(
            method, self.url + path, headers={"Authorization": f"Bearer {key}"}, json=body, timeout=150
        )
        reply.raise_for_status()
        return reply.json()

    def status(self) -> Any:
        return self.admin("GET", "/v1/admin/status")

    def turns(self, limit: int = 1000) -> list[Any]:
        """Return whole records of the newest turns, oldest first."""
        rows = self.admin("GET", f"/v1/turns?limit={limit}")["turns"]
        return [self.admin("GET", f"/v1/turns/{row['turn_id']}") for row in reversed(rows)]

    def wait_for_turn(self, turn_id: str, state: str, timeout_s: float) -> Any:
        """Poll the turn until it is in this state; return its record. Raises TimeoutError."""
        end = time.monotonic() + timeout_s
        while (record := self.admin("GET", f"/v1/turns/{turn_id}"))["state"] != state:
            if time.monotonic() > end:
                raise TimeoutError(f"not within {timeout_s:g} s: turn {state}; it is {record['state']}")
            time.sleep(0.5)
        return record

    def kill_child(self, name: str, timeout_s: float) -> None:
        """Kill a child process of the server, and wait until another one works. Raises TimeoutError."""
        pid = next(child["pid"] for child in self.status()["children"] if child["name"] == name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

        def is_back(now: Any) -> bool:
            (child,) = (child for child in now["children"] if child["name"] == name)
            return not now["problems"] and child["pid"] not in (None, pid)

        self.wait_for(f"the {name} is back", is_back, timeout_s)

    def wait_for(self, what: str, is_so: Any, timeout_s: float) -> Any:
        """Poll the status until `is_so(status)`; return it. Raises TimeoutError."""
        end = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if is_so(status):
                return status
            if time.monotonic() > end:
                raise TimeoutError(f"not within {timeout_s:g} s: {what}; {json.dumps(status)[:2000]}")
            time.sleep(0.5)

"""An engine process of a check: SGLang, or the embedded engine in its place. It outlives the call that started it.

WORK/engine.json holds its port and pid, so that a later call finds it. (`RunningServer` ends with its `with` block, and
starts our server only.)
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from gpu.host import SglangHost
from gpu.models import TARGETS
from openclaw_rl.engines.sglang import launch
from openclaw_rl.processes.command import free_port
from openclaw_rl.settings import EngineSettings

HEALTH_POLL_S = 0.3
MOST_RANK, MEMORY_FRACTION = 16, 0.3


def sglang_command(
    python: str,
    settings: EngineSettings,
    *,
    folder: Path,
    name: str,
    port: int,
    context_length: int | None,
    adapters: launch.Adapters | None,
) -> list[str]:
    """Return the command line with which our server would start SGLang."""
    arguments = launch.argv(
        launch.look(python), settings, folder=folder, name=name, port=port, context_length=context_length,
        adapters=adapters,
    )  # fmt: skip
    return [python, "-I", "-m", launch.MODULE, *arguments]


def start_engine(
    host: SglangHost,
    work: Path,
    *,
    slots: int,
    log: str = "engine.log",
    port: int | None = None,
    card: int | None = None,
    names_ids: bool = False,
) -> tuple["EngineProcess", list[str]]:
    """Start the engine of the check on the host's model; return it, and its command line.

    work: folder by which later calls find it. slots: adapters served together. card: the only GPU that it sees.
    names_ids: it scores given ids.
    """
    port = port or free_port()
    work.mkdir(exist_ok=True)
    environ = dict(os.environ) if card is None else os.environ | {"CUDA_VISIBLE_DEVICES": str(card)}
    if host.engine_python is not None:
        settings = EngineSettings(kind="sglang", args=tuple(host.engine_args), memory_fraction=MEMORY_FRACTION)
        command = sglang_command(
            host.engine_python,
            settings,
            folder=host.model,
            name="check",
            port=port,
            context_length=None,
            adapters=launch.Adapters(MOST_RANK, tuple(TARGETS), slots),
        )
        command += launch.TAKES_IDS if names_ids else ()
        environ |= launch.ENVIRON
    else:
        command = embedded_command(sys.executable, work, folder=host.model, port=port)
    return EngineProcess.start(work, command, environ, log=host.out / log, port=port), command


def embedded_command(python: str, work: Path, *, folder: Path, port: int) -> list[str]:
    config = {"port": port, "model": {"path": str(folder)}, "engine": {"threads": 1}}
    config |= {"cache_dir": str(work / "cache"), "port_file": str(work / "port.json")}
    file = work / "embedded.json"
    file.write_text(json.dumps(config))
    return [python, "-m", "openclaw_rl.engines.embedded", "--config", str(file)]


@dataclass(frozen=True, slots=True)
class EngineProcess:
    port: int
    pid: int
    start_s: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @classmethod
    def known(cls, work: Path) -> "EngineProcess | None":
        """Return the engine that was started last, which may have ended; None if there was none."""
        file = work / "engine.json"
        if not file.is_file():
            return None
        found = json.loads(file.read_text())
        return cls(found["port"], found["pid"])

    @classmethod
    def start(
        cls, work: Path, command: Sequence[str], environ: Mapping[str, str], *, log: Path, port: int
    ) -> "EngineProcess":
        """Start an engine and wait until it is healthy. Raises RuntimeError if it dies."""
        started = time.monotonic()
        with log.open("ab") as out:
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        engine = cls(port, process.pid)
        (work / "engine.json").write_text(json.dumps({"port": port, "pid": process.pid, "url": engine.url}))
        engine.wait()
        return cls(port, process.pid, round(time.monotonic() - started, 1))

    def wait(self) -> None:
        """Wait until the engine is healthy. Raises RuntimeError if it dies."""
        while not self.is_healthy():
            if not self.is_alive():
                raise RuntimeError(f"the engine of pid {self.pid} died")
            time.sleep(HEALTH_POLL_S)

    def is_alive(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # reaps the child of this call
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def stop(self, grace_s: float = 30.0) -> bool:
        """Send SIGTERM, then SIGKILL after the grace time; return False if SIGKILL was needed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        end = time.monotonic() + grace_s
        while time.monotonic() < end:
            if not self.is_alive():
                return True
            time.sleep(0.1)
        self.kill()
        return False

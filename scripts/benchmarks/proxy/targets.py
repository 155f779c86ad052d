"""Programs that `proxy_overhead` measures, each in a process of its own: started, waited for, ended."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from benchmarks.proxy.load import Target
from openclaw_rl.testing.running_server import RunningServer

_START_S = 180.0
_LITELLM = """\
model_list:
  - model_name: policy
    litellm_params: {{model: openai/policy, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}
"""


class Targets:
    """The stub engine, ours, the bare relay, and the forwarders whose programs are given. A context manager."""

    def __init__(
        self,
        folder: Path,
        key: str,
        *,
        litellm: Path | None,
        router: Path | None,
        options: Mapping[str, str] = {},
    ) -> None:
        """litellm: the program `litellm`. router: a Python interpreter that has sglang-router. options: settings of
        ours."""
        self._folder, self._key, self._litellm, self._router = folder, key, litellm, router
        self._options = options
        self._stack = ExitStack()

    def __enter__(self) -> dict[str, Target]:
        try:
            return self._start()
        except BaseException:
            self._stack.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> dict[str, Target]:
        port, pid = self._own("stub")
        found = [
            Target("engine", port, pid, "/generate"),
            Target("engine, OpenAI", port, pid),
            Target("relay", *self._own("relay", str(port)), "/generate"),
            self._ours(port),
        ]
        if self._litellm is not None:
            found.append(self._start_litellm(self._litellm, port))
        if self._router is not None:
            found.append(self._start_router(self._router, port))
        return {target.name: target for target in found}

    def _ours(self, engine_port: int) -> Target:
        options = {
            "engine.kind": "url",
            "engine.url": f"http://127.0.0.1:{engine_port}",
            "trainer.kind": "external",
            "server.api_keys": f'[{{key = "{self._key}", user = "bench"}}]',  # LiteLLM refuses to start without one
            **self._options,
        }
        flags = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
        server = self._stack.enter_context(RunningServer(self._folder / "data", flags))
        assert server.process is not None
        return Target("ours", int(server.url.rpartition(":")[2]), server.process.pid)

    def _start_litellm(self, program: Path, engine_port: int) -> Target:
        config, port = self._folder / "litellm.yaml", free_port()
        config.write_text(_LITELLM.format(port=engine_port))
        flags = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        quiet = {
            "LITELLM_MASTER_KEY": self._key, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR",
            "LITELLM_MODE": "PRODUCTION", "LITELLM_TELEMETRY": "False", "DISABLE_ADMIN_UI": "True", "NO_DOCS": "True",
        }  # fmt: skip
        process = self._run([str(program), *flags, "--num_workers", "1", "--telemetry", "False"], quiet)
        _wait(f"http://127.0.0.1:{port}/health/liveliness", process)
        return Target("LiteLLM", port, process.pid)

    def _start_router(self, interpreter: Path, engine_port: int) -> Target:
        port = free_port()
        flags = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{engine_port}"]
        flags += ["--policy", "round_robin", "--prometheus-port", str(free_port()), "--log-level", "warn"]
        process = self._run([str(interpreter), "-m", "sglang_router.launch_router", *flags])
        _wait(f"http://127.0.0.1:{port}/readiness", process)
        return Target("sglang-router", port, process.pid)

    def _own(self, module: str, *arguments: str) -> tuple[int, int]:
        """Start a module of this folder that writes its port to a file; return the port and the process id."""
        where = self._folder / f"{module}.json"
        process = self._run([sys.executable, "-m", f"benchmarks.proxy.{module}", str(where), *arguments])
        end = time.monotonic() + _START_S
        while not where.is_file():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{module} did not start; see {self._folder}")
            time.sleep(0.1)
        return int(json.loads(where.read_text())["port"]), process.pid

    def _run(self, argv: Sequence[str], environ: Mapping[str, str] = {}) -> "subprocess.Popen[bytes]":
        out = self._stack.enter_context((self._folder / "output.log").open("ab"))
        environ = {**os.environ, "PYTHONSAFEPATH": "1", **environ}
        process = subprocess.Popen(argv, env=environ, stdout=out, stderr=out, cwd=self._folder)
        self._stack.callback(_end, process)
        return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise RuntimeError(f"{process.args!r} did not answer at {url}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])

"""A real, unmodified OpenClaw on loopback, installed from npm and driven through its gateway.

It is configured for one OpenAI-compatible URL. It needs npm (any Node that runs it); Node 24 is installed beside the
client. The script writes to one folder only.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

OPENCLAW, NODE = "openclaw@2026.9.6", "node@24"
GATEWAY_START_S, TURN_S = 180, 600


def install(folder: Path) -> Path:
    """Install the client into folder/inst once; return the folder of its executables."""
    inst = folder / "inst"
    binaries = inst / "node_modules" / ".bin"
    if not (binaries / "openclaw").exists():
        inst.mkdir(parents=True, exist_ok=True)
        (inst / "package.json").write_text('{"private": true}')
        quiet = ["--no-fund", "--no-audit", "--loglevel=error"]
        subprocess.run(["npm", "i", *quiet, NODE], cwd=inst, check=True)
        subprocess.run(
            ["npm", "i", *quiet, OPENCLAW],
            cwd=inst,
            check=True,
            env=os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"},
        )
    return binaries


@dataclass(frozen=True, slots=True)
class Provider:
    """The model provider in the client's configuration."""

    base_url: str
    model: str
    api_key: str
    compat: Mapping[str, Any]
    max_tokens: int = 256


def config(
    provider: Provider, *, workspace: Path, port: int, token: str, log_file: Path, heartbeat_every: str
) -> dict[str, Any]:
    """Return the configuration of the smallest agent profile (no tools, no bootstrap).

    Its system prompt has about 1.8k tokens, which an 8k model can hold.
    """
    entry = {
        "id": provider.model,
        "name": provider.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": 8192,
        "maxTokens": provider.max_tokens,
    }
    if provider.compat:
        entry["compat"] = dict(provider.compat)
    return {
        "logging": {"file": str(log_file)},
        "models": {
            "mode": "replace",
            # `qwen` would pull in a provider plugin of that name.
            "providers": {
                "rl": {
                    "baseUrl": provider.base_url,
                    "apiKey": provider.api_key,
                    "api": "openai-completions",
                    "models": [entry],
                }
            },
        },
        "agents": {
            "defaults": {
                "model": {"primary": f"rl/{provider.model}"},
                "workspace": str(workspace),
                "heartbeat": {"every": heartbeat_every},
                "skipBootstrap": True,
                "contextInjection": "never",
                "skills": [],
            }
        },
        "tools": {"deny": ["*"]},
        "gateway": {"mode": "local", "port": port, "bind": "loopback", "auth": {"mode": "token", "token": token}},
    }


def environ(binaries: Path, home: Path) -> dict[str, str]:
    """Return an environment in which the client keeps all of its files in `home`."""
    state = home / ".openclaw"
    return os.environ | {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "HOME": str(home),
        "OPENCLAW_STATE_DIR": str(state),
        "OPENCLAW_CONFIG_PATH": str(state / "openclaw.json"),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Gateway:
    """The client's gateway on loopback; a context manager that ends only the process that it started."""

    def __init__(self, environ: Mapping[str, str], *, port: int, token: str, out: Path) -> None:
        self._environ, self._port, self._token, self._out = dict(environ), port, token, out
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        argv = ["openclaw", "gateway", "--port", str(self._port), "--bind", "loopback"]
        argv += ["--auth", "token", "--token", self._token]
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(argv, env=self._environ, stdout=out, stderr=out)
        end = time.monotonic() + GATEWAY_START_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/healthz", timeout=5):
                    return self
            except OSError:
                if time.monotonic() > end or self._process.poll() is not None:
                    self.__exit__(None, None, None)
                    raise RuntimeError(f"the gateway did not come up: {self._out.read_text()[-2000:]}") from None
                time.sleep(0.5)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class OpenClaw:
    """Running gateway and the chats through it; a context manager that ends only its own processes."""

    def __init__(
        self,
        folder: Path,
        *,
        base_url: str,
        model: str,
        api_key: str = "none",
        compat: Mapping[str, Any] | None = None,
        heartbeat_every: str = "0m",
        max_tokens: int = 256,
    ) -> None:
        self._binaries = install(folder)
        self._run = folder / "run"
        shutil.rmtree(self._run, ignore_errors=True)
        state = self._run / ".openclaw"
        state.mkdir(parents=True)
        port, token = free_port(), secrets.token_hex(12)
        path = state / "openclaw.json"
        body = config(
            Provider(base_url, model, api_key, compat or {}, max_tokens),
            workspace=self._run / "workspace",
            port=port,
            token=token,
            log_file=self._run / "openclaw.log",
            heartbeat_every=heartbeat_every,
        )
        path.write_text(json.dumps(body, indent=2))
        self._environ = environ(self._binaries, self._run) | {"OPENCLAW_GATEWAY_TOKEN": token}
        self._gateway = Gateway(self._environ, port=port, token=token, out=self._run / "gateway.out")

    def __enter__(self) -> Self:
        subprocess.run(["openclaw", "config", "validate"], env=self._environ, check=True, stdout=subprocess.DEVNULL)
        self._gateway.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gateway.__exit__(kind, error, trace)

    def say(self, session: str, message: str) -> str:
        """Send one user message; return the agent's reply. Raises CalledProcessError if the client fails."""
        argv = [
            "openclaw",
            "agent",
            "--agent",
            "main",
            "--session-key",
            f"agent:main:{session}",
            "--message",
            message,
            "--timeout",
            str(TURN_S),
        ]
        done = subprocess.run(argv, env=self._environ, check=True, capture_output=True, text=True, timeout=TURN_S + 120)
        return done.stdout.strip()

    def event(self, text: str) -> None:
        """Send a system event: the agent's heartbeat runs at once, in its main session, without the user."""
        argv = ["openclaw", "system", "event", "--text", text, "--mode", "now"]
        subprocess.run(argv, env=self._environ, check=True, capture_output=True, text=True, timeout=120)

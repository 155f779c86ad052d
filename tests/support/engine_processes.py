"""Stub engines in processes of their own, that are killed and started again at the same port."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
from ports import free_port

_START_S = 120.0
_HOLDING = Path(__file__).with_name("holding_stub.py")


class EngineProcess:
    """One stub engine. As a context manager it ends only the process that it started."""

    def __init__(self, folder: Path, *flags: str, hold: Path | None = None) -> None:
        """hold: replies stand still while this file exists (`holding_stub`)."""
        folder.mkdir(parents=True)
        self._program = ["-m", "openclaw_rl.testing"] if hold is None else [str(_HOLDING), str(hold)]
        self._where, self._flags, self._port = folder / "engine.json", flags, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> "EngineProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._where.unlink(missing_ok=True)
        argv = [sys.executable, *self._program, "--port-file", str(self._where)]
        argv += ["--port", str(self._port), *self._flags]
        self._process = subprocess.Popen(argv, env=os.environ | {"PYTHONSAFEPATH": "1"})
        end = time.monotonic() + _START_S
        while not self._where.is_file():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the stub engine did not start")
            time.sleep(0.02)
        self.url = str(json.loads(self._where.read_text())["url"])

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def adapters(self) -> set[str]:
        listed = httpx.get(f"{self.url}/v1/models", timeout=60).json()["data"]
        return {card["id"] for card in listed if card.get("parent")}

    def weight_version(self) -> str:
        return str(httpx.get(f"{self.url}/model_info", timeout=60).json()["weight_version"])

"""An environment in which `sglang.launch_server` is the stub engine: for servers that start SGLang themselves."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

_LAUNCH = """
import asyncio, json, os, sys
from pathlib import Path
from openclaw_rl.testing import FakeEngine
from openclaw_rl.testing.__main__ import main

words = sys.argv
port, own = words[words.index("--port") + 1], words[words.index("--stub") + 1 :]
seen = {"pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
(Path(__file__).parent / f"{port}.json").write_text(json.dumps(seen))
take, held = FakeEngine.update_weights, Path(__file__).parent / f"{port}.held"

async def update_weights(self, *given):
    while held.exists():
        held.write_text("asked")
        await asyncio.sleep(0.02)
    await take(self, *given)

FakeEngine.update_weights = update_weights
sys.argv = ["stub", "--port", port, *own]
main()
"""
_OPTIONS = "class ServerArgs:\n    incremental_streaming_output: bool = False\n"


class StubSGLang:
    """Make the environment in `root`. `engine.args` must end with `--stub` and the stub's own flags."""

    def __init__(self, root: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
        self.python = root / "bin" / "python"
        site = next((root / "lib").glob("python3*")) / "site-packages"
        self._folder = site / "sglang"
        (self._folder / "srt").mkdir(parents=True)
        (self._folder / "__init__.py").touch()
        (self._folder / "srt" / "server_args.py").write_text(_OPTIONS)
        (self._folder / "launch_server.py").write_text(_LAUNCH)
        info = site / "sglang-0.5.15.post1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: sglang\nVersion: 0.5.15.post1\n")
        ours = sysconfig.get_path("purelib")
        (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")

    def hold(self, url: str) -> None:
        """Let the process of this URL take no weights, however long it lives."""
        (self._folder / f"{url.rpartition(':')[2]}.held").touch()

    def is_held(self, url: str) -> bool:
        """Return True once that process was given weights, and waits."""
        return (self._folder / f"{url.rpartition(':')[2]}.held").read_text() == "asked"

    def seen(self, url: str) -> Any:
        """Return the `pid` and the `gpus` of the process that was started for this URL."""
        return json.loads((self._folder / f"{url.rpartition(':')[2]}.json").read_text())


def with_gpus(folder: Path, count: int) -> Path:
    """Return a folder for PATH, in which `nvidia-smi` lists so many GPUs."""
    folder.mkdir()
    file = folder / "nvidia-smi"
    file.write_text(f'#!/bin/sh\nfor n in $(seq {count}); do echo "GPU $n: a card"; done\n')
    file.chmod(0o755)
    return folder

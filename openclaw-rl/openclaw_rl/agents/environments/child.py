"""A program of ours in a process of its own, asked by lines of JSON: its time and memory are bounded, and it may die.

For work on values that a model wrote, in packages that no sandbox holds. The process has an empty environment, and it
ends with the runner, also by `kill -9`. `child_main` is the other side.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openclaw_rl.agents.environments import child_main
from openclaw_rl.errors import EnvironmentFault

_START_S = 120.0
"""A first import of large packages beside other work."""
_LONGEST_LINE = 64 * 1024 * 1024


class ChildGone(Exception):
    """The process ended, or did not answer in time and was killed."""


class Child:
    """One process. `ask` starts it where none runs; as a context manager it ends it."""

    def __init__(self, program: Path, *, memory_mb: int = 2048, file_mb: int = 1) -> None:
        """program: a file with a function `answer(asked)`, from a JSON object to one. file_mb: its longest file."""
        self._program, self._memory_mb, self._file_mb = program, memory_mb, file_mb
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def ask(self, asked: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """Return the answer. Raises ChildGone; the next question starts a new process."""
        async with self._lock:
            process = self._process or await self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                async with asyncio.timeout(timeout_s):
                    process.stdin.write(json.dumps(asked).encode() + b"\n")
                    await process.stdin.drain()
                    line = await process.stdout.readline()
                found = json.loads(line) if line else None
            except (TimeoutError, OSError, ValueError):
                found = None
            except BaseException:
                await self._stop()  # its late answer must not meet the next question
                raise
            if not isinstance(found, dict):
                await self._stop()
                raise ChildGone(f"{self._program.name} did not answer within {timeout_s:g} s, or died")
            return found

    async def close(self) -> None:
        await self._stop()

    async def _start(self) -> asyncio.subprocess.Process:
        """Start the process and wait for its first line. Raises EnvironmentFault."""
        # -I: neither the working folder nor PYTHONPATH may add modules.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", child_main.__file__, str(self._program), str(self._memory_mb), str(self._file_mb)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            start_new_session=True,  # a Ctrl-C of the terminal is the runner's
            limit=_LONGEST_LINE,
        )
        self._process = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                ready = await process.stdout.readline()
        except TimeoutError:
            ready = b""
        except BaseException:
            await self._stop()
            raise
        if not ready:
            await self._stop()
            assert process.stderr is not None
            errors = (await process.stderr.read(4096)).decode("utf-8", "replace").strip().splitlines()
            raise EnvironmentFault(f"{self._program.name} did not start: {errors[-1] if errors else 'no reason given'}")
        return process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def __aenter__(self) -> "Child":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

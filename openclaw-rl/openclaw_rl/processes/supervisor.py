"""Child processes: started, watched, restarted with growing pauses, stopped. Only what we started is ever ended, by
its own handle.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S, HEALTHY_AFTER_S = 0.5, 30.0, 60.0
SAID_QUICK_EXITS = 3
"""A child that cannot live is told of so many times, and once more when it lives; `/healthz` goes on saying it."""
_SUPERVISED = Path(__file__).with_name("child_main.py")


@dataclass(frozen=True, slots=True)
class ChildStatus:
    name: str
    pid: int | None
    restarts: int
    last_exit: int | None
    quick_exits: int = 0
    """Ends in a row that came soon after a start; 0 again once it has run for `HEALTHY_AFTER_S`, or `worked`."""


class Child:
    """One supervised process of ours. `run` belongs in the app's TaskGroup; cancelling it stops the process."""

    def __init__(
        self,
        name: str,
        module: str,
        args: Sequence[str],
        *,
        python: str | None,
        log_file: Path,
        stop_grace_s: float = 20.0,
        on_exit: Callable[[], Awaitable[None]] | None = None,
        is_foreign: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """python: None: this interpreter.
        is_foreign: `python` is of an environment without our packages.
        environ: variables on top of ours.
        """
        self.name = name
        # -I: neither our folder nor our PYTHONPATH may shadow modules of the other environment.
        start = ["-I", str(_SUPERVISED)] if is_foreign else ["-m", "openclaw_rl.processes.child_main"]
        variables = [word for variable, value in (environ or {}).items() for word in ("--env", f"{variable}={value}")]
        self._argv = [python or sys.executable, *start, *variables, module, *args]
        self._log_file = log_file
        self._stop_grace_s = stop_grace_s
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._restarts = 0
        self._quick_exits = 0
        self._started_at = 0.0
        self._last_exit: int | None = None
        self._stopping = False

    def status(self) -> ChildStatus:
        pid = self._process.pid if self._process and self._process.returncode is None else None
        return ChildStatus(self.name, pid, self._restarts, self._last_exit, self._quick_exits)

    @property
    def up_s(self) -> float:
        """How long the process has been running; 0 when there is none."""
        return 0.0 if self.status().pid is None else time.monotonic() - self._started_at

    def worked(self) -> None:
        """It did what it is for: whatever ended it before is over."""
        if self._quick_exits >= SAID_QUICK_EXITS:
            log.info("child_works_again", child=self.name, quick_exits=self._quick_exits)
        self._quick_exits = 0

    def last_line(self) -> str:
        """What the process said last, for a person who asks why it is gone."""
        lines = self._log_file.read_text(errors="replace").split("\n") if self._log_file.exists() else []
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")

    async def run(self) -> None:
        """Keep the process running until cancelled or stopped."""
        pause_s = FIRST_PAUSE_S
        try:
            while not self._stopping:
                self._started_at = time.monotonic()
                await self._spawn()
                assert self._process is not None
                self._last_exit = await self._end_of(self._process)
                self._end_group()
                if self._stopping:
                    return
                if self._on_exit:
                    await self._on_exit()
                is_quick = time.monotonic() - self._started_at <= HEALTHY_AFTER_S
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S) if is_quick else FIRST_PAUSE_S
                self._quick_exits += 1
                say = log.warning if self._quick_exits <= SAID_QUICK_EXITS else log.debug
                say(
                    "child_exited", child=self.name, exit=self._last_exit, restart_in_s=pause_s, log=str(self._log_file)
                )
                self._restarts += 1
                await asyncio.sleep(pause_s)
        finally:
            await self.stop()

    async def _end_of(self, process: asyncio.subprocess.Process) -> int:
        try:
            async with asyncio.timeout(HEALTHY_AFTER_S):
                return await process.wait()
        except TimeoutError:
            self.worked()
        return await process.wait()

    def kill_hung(self) -> None:
        """It does not answer and would not hear a SIGTERM: end it, and `run` starts it again."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the grace."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_grace_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _end_group(self) -> None:
        """What the process left behind (it led a group of its own): a restart must find its GPU memory free."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _spawn(self) -> None:
        descriptor = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # stdin is the lifeline: it closes with us, and the child leaves (child_main.py).
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, stdin=asyncio.subprocess.PIPE, stdout=descriptor, stderr=descriptor, start_new_session=True
            )
        finally:
            os.close(descriptor)
        log.info("child_started", child=self.name, pid=self._process.pid)

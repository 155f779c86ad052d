"""Supervisor of child processes: starts them, watches them, restarts them with growing pauses, stops them.

It ends only the processes that it started, each by its own handle.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from openclaw_rl.backoff import Backoff
from openclaw_rl.processes.command import ChildCommand, end_group, last_error, lifeline

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S, HEALTHY_AFTER_S = 0.5, 30.0, 60.0
SAID_QUICK_EXITS = 3
"""Warnings in a row about a child that keeps ending; one more line says that it works again. `/healthz` lists the
child all the time."""


@dataclass(frozen=True, slots=True)
class ChildStatus:
    name: str
    pid: int | None
    restarts: int
    last_exit: int | None
    quick_exits: int = 0
    """Ends in a row soon after a start. It is 0 again after `HEALTHY_AFTER_S` of running, or after `worked`."""


class Child:
    """One supervised process. `run` belongs in the server's TaskGroup; cancelling `run` stops the process."""

    def __init__(
        self,
        name: str,
        command: ChildCommand,
        *,
        log_file: Path,
        stop_grace_s: float = 20.0,
        on_exit: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """on_exit: awaited whenever the process ended without a request to stop."""
        self.name = name
        self.command = command
        """Command of the next start."""
        self._log_file = log_file
        self._stop_grace_s = stop_grace_s
        self._on_exit = on_exit
        self._pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._process: asyncio.subprocess.Process | None = None
        self._restarts = 0
        self._quick_exits = 0
        self._started_at = 0.0
        self._last_exit: int | None = None
        self._stopping = asyncio.Event()

    def status(self) -> ChildStatus:
        pid = self._process.pid if self._process and self._process.returncode is None else None
        return ChildStatus(self.name, pid, self._restarts, self._last_exit, self._quick_exits)

    @property
    def up_s(self) -> float:
        """Seconds since the process started; 0 while no process runs."""
        return 0.0 if self.status().pid is None else time.monotonic() - self._started_at

    def worked(self) -> None:
        """Take the process for healthy: its quick exits in a row start again at zero."""
        if self._quick_exits >= SAID_QUICK_EXITS:
            log.info("child_works_again", child=self.name, quick_exits=self._quick_exits)
        self._quick_exits = 0

    def last_error(self) -> str:
        """Return the last error in the process's log and the log's place, for a user who asks why the process ended."""
        return last_error(self._log_file)

    async def run(self) -> None:
        """Keep the process running until cancelled or stopped."""
        try:
            while not self._stopping.is_set():
                self._started_at = time.monotonic()
                process = await self._spawn()
                if self._stopping.is_set():  # `stop` came during the start, and saw no process
                    return
                self._last_exit = await self._end_of(process)
                end_group(process.pid)
                if self._stopping.is_set():
                    return
                await self._unless_stopped(self._before_the_next())
        finally:
            await self.stop()

    async def _before_the_next(self) -> None:
        if self._on_exit:
            await self._on_exit()
        await self._pause()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, and give it up at `stop`. A pause may be half a minute."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _end_of(self, process: asyncio.subprocess.Process) -> int:
        try:
            async with asyncio.timeout(HEALTHY_AFTER_S):
                return await process.wait()
        except TimeoutError:
            self.worked()
        return await process.wait()

    async def _pause(self) -> None:
        """Log the end of the process and wait before the next start."""
        if time.monotonic() - self._started_at > HEALTHY_AFTER_S:
            self._pauses.reset()
        pause_s = self._pauses.next_s()
        self._quick_exits += 1
        write = log.warning if self._quick_exits <= SAID_QUICK_EXITS else log.debug
        write("child_exited", child=self.name, exit=self._last_exit, restart_in_s=pause_s, log=str(self._log_file))
        self._restarts += 1
        await asyncio.sleep(pause_s)

    def kill_hung(self) -> None:
        """Kill a process that hangs; `run` starts it again."""
        # SIGKILL at once: a stopped process does not handle SIGTERM.
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after the grace."""
        self._stopping.set()
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

    async def _spawn(self) -> asyncio.subprocess.Process:
        descriptor = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command.argv(), stdout=descriptor, stderr=descriptor, **lifeline()
            )
        finally:
            os.close(descriptor)
        log.info("child_started", child=self.name, pid=self._process.pid)
        return self._process

"""Runs the processes of a node: PRM, server, driver. Standard library only.

Promises:

- It ends only the processes that it started, by their handle and group, and all of them. The driver ends first, so that
  it can write a checkpoint.
- A driver or PRM that dies is started again with growing pauses, while the server and its chats go on. The server gets
  the driver's last error, for `/healthz`.
- A server that dies is started again too, and the run goes on from the checkpoints that are on disk.
- A driver that says that it cannot start (exit 2) is tried again after five minutes. Chats go on, and the server names
  the driver at once.
- A server that was asked to stop (exit 0), or one that does not come up again, ends the run.
- When this process is killed, its children notice and exit (`openclaw_rl.processes.child_main`).
"""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openclaw_rl.backoff import Backoff
from openclaw_rl.errors import SettingsError
from openclaw_rl.processes.command import ChildCommand, ModuleSearch, end_group, last_error, lifeline

POLL_S = 0.5
START_TIMEOUT_S = 900.0
DRIVER_GRACE_S, GRACE_S = 300.0, 60.0
"""Seconds from SIGTERM to SIGKILL; a driver finishes its step and writes a checkpoint."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, HEALTHY_AFTER_S = 2.0, 60.0, 300.0
CANNOT_START, CANNOT_START_PAUSE_S = 2, 300.0
"""Exit code of a driver whose start cannot work as it is, and the pause before the next try: a person must mend it."""
MOST_FAILED_STARTS = 5
"""Starts in a row after which a server that does not come up ends the run."""
REPORT_S = 5.0
LONGEST_REASON = 1000
"""Characters of a reason that the server takes."""

# These calls stay on this host: no proxy that the environment names gets them.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Command:
    """`python -m module arguments`, with these variables on top of ours."""

    name: str
    python: str
    module: str
    arguments: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    """Port that the process will listen on; another process there would answer in its place."""
    model: str | None = None
    """Model that its `/model_info` must name."""


class DoesNotStart(SettingsError):
    """A process of the first start ended, or did not come up."""

    def __init__(self, command: Command, problem: str) -> None:
        super().__init__(f"{command.name} {problem}")
        self.command = command


class Process:
    """One started command; its output goes to a log file, or to the terminal without one."""

    def __init__(self, command: Command, log_file: Path | None) -> None:
        self.command, self._log_file = command, log_file
        self._started = time.monotonic()
        self._ended: float | None = None
        argv = ChildCommand(
            command.module, command.arguments, command.python, command.environ, ModuleSearch.BY_PATH
        ).argv()
        output = None if log_file is None else log_file.open("ab")
        try:
            self._popen = subprocess.Popen(argv, stdout=output, stderr=output, **lifeline())
        except OSError as error:
            raise SettingsError(f"{command.name}: {command.python}: {error.strerror}") from error
        finally:
            if output is not None:
                output.close()
        _say(f"{command.name} started, pid {self._popen.pid}" + (f", log {log_file}" if log_file else ""))

    @property
    def exit_code(self) -> int | None:
        code = self._popen.poll()
        if code is not None and self._ended is None:
            self._ended = time.monotonic()
        return code

    @property
    def ran_s(self) -> float:
        return (self._ended or time.monotonic()) - self._started

    def last_error(self) -> str:
        return "see above" if self._log_file is None else last_error(self._log_file)

    def stop(self, grace_s: float) -> None:
        """End the process: SIGTERM, SIGKILL after the grace; then the rest of its group."""
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(grace_s)
            except subprocess.TimeoutExpired:
                _say(f"{self.command.name} did not end within {grace_s:g} s: killed")
                self._popen.kill()
                self._popen.wait()
        self.clear()

    def clear(self) -> None:
        """End what it left in its group: a restart must find its GPU memory free."""
        end_group(self._popen.pid)


class Restarted:
    """A command that is started again whenever it ends."""

    def __init__(self, command: Command, log_file: Path | None, *, cannot_start: int | None = None) -> None:
        """cannot_start: exit code that says that the next start would end like this one."""
        self._command, self._log_file, self._cannot_start = command, log_file, cannot_start
        self._pauses, self._again_at = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0.0
        self.process = Process(command, log_file)

    def look(self, *, may_start: bool = True) -> int | None:
        """Check the process. Return its exit code once if it ended, and start it again after its pause, if it may."""
        if (code := self.process.exit_code) is None:
            return None
        now = time.monotonic()
        if not self._again_at:
            self.process.clear()
            if self.process.ran_s > HEALTHY_AFTER_S:
                self._pauses.reset()
            pause_s = CANNOT_START_PAUSE_S if code == self._cannot_start else self._pauses.next_s()
            self._again_at = now + pause_s
            _say(f"{self._command.name} ended with {code}, again in {pause_s:.0f} s: {self.process.last_error()}")
            return code
        if may_start and now >= self._again_at:
            self._again_at = 0.0
            self.process = Process(self._command, self._log_file)
        return None


def run(prm: Command | None, server: Command, driver: Command, *, data_dir: Path) -> int:
    """Start the processes, keep them running, and stop them on a signal. Return the exit code.

    Raises DoesNotStart if the PRM or the server does not come up, and SettingsError if a start cannot work.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logs = data_dir / "logs"
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    announced = data_dir / "run" / "server.json"
    announced.unlink(missing_ok=True)  # of a server that was killed
    for command in (prm, server):
        if command is not None:
            _check_port(command)
    running: list[tuple[Process | Restarted, float]] = []
    try:
        judge = None
        if prm is not None:
            judge = Restarted(prm, logs / "prm.log")
            running.append((judge, GRACE_S))
            if not _wait(stop, judge.process, lambda: _serves(prm)):
                return 0
        front = Restarted(server, None)
        running.append((front, GRACE_S))
        if not _wait(stop, front.process, announced.exists):
            return 0
        trainer = Restarted(driver, logs / "driver.log", cannot_start=CANNOT_START)
        running.append((trainer, DRIVER_GRACE_S))
        failed_starts = 0
        unsaid: int | None = None
        """Exit code of the driver that the server has not heard of."""
        while not stop.wait(POLL_S):
            if (code := front.look()) is not None:
                is_up = announced.exists() or front.process.ran_s > HEALTHY_AFTER_S
                failed_starts = 0 if is_up else failed_starts + 1
                announced.unlink(missing_ok=True)  # of the server that died
                unsaid = trainer.process.exit_code  # the next one has not heard of it
                if code == 0 or failed_starts >= MOST_FAILED_STARTS:
                    return code
            if judge is not None:
                judge.look()
            # A driver without a server would only end again.
            unsaid = trainer.look(may_start=announced.exists()) or unsaid
            if trainer.process.exit_code is None or (unsaid and _report(data_dir, trainer.process, unsaid)):
                unsaid = None
        return 0
    finally:
        for part, grace_s in reversed(running):
            (part.process if isinstance(part, Restarted) else part).stop(grace_s)


def _report(data_dir: Path, process: Process, code: int) -> bool:
    """Tell the server that the driver ended, and why. Return False if the server is away, or starts."""
    name, cannot_start = process.command.name, code == CANNOT_START
    what = "it cannot start" if cannot_start else f"it ended with {code} after {process.ran_s:.0f} s"
    reason = f"{what}: {process.last_error()}"[:LONGEST_REASON]
    body = {"trainer": name, "reason": reason, "has_ended": True, "cannot_start": cannot_start}
    try:
        url = json.loads((data_dir / "run" / "server.json").read_text())["url"]
        token = (data_dir / "keys" / "trainer.token").read_text().strip()
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/trainer/failed", json.dumps(body).encode(), headers)
        _OPENER.open(request, timeout=REPORT_S).close()
    except (OSError, ValueError, LookupError):
        return False
    return True


def _wait(stop: threading.Event, process: Process, is_up: Callable[[], bool]) -> bool:
    """Wait until the process is up; return False on a stop. Raises SettingsError if it ends or does not come up."""
    end = time.monotonic() + START_TIMEOUT_S
    while not stop.wait(POLL_S):
        if is_up():
            return True
        if process.exit_code is not None:
            raise DoesNotStart(process.command, f"does not start: {process.last_error()}")
        if time.monotonic() > end:
            raise DoesNotStart(process.command, f"did not come up within {START_TIMEOUT_S:g} s")
    return False


def _serves(command: Command) -> bool:
    """Return True if the engine answers. Raises SettingsError if it serves another model."""
    try:
        with _OPENER.open(f"http://127.0.0.1:{command.port}/model_info", timeout=5) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return False
    if found.get("model_path") != command.model:
        raise SettingsError(f"{command.name}: port {command.port} serves {found.get('model_path')!r}")
    return True


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _check_port(command: Command) -> None:
    if not is_free(command.port or 0):
        raise SettingsError(f"{command.name}: port {command.port} is in use")


def _say(text: str) -> None:
    sys.stderr.write(f"[launch] {text}\n")
    sys.stderr.flush()

"""Command line, lifeline, port and log of a supervised child process, for asyncio's supervisor and slime's threads.

Standard library only: the launcher of a slime node imports it too.
"""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypedDict

from openclaw_rl.errors import SettingsError
from openclaw_rl.types.pictures import without_data

HIGHEST_PORT = 55_535
"""SGLang adds 10,000 to its port for gRPC and refuses a sum above 65,535, also with gRPC off."""
LONGEST_LINE = 300
_TRIES = 200
_TAIL_BYTES = 64 * 1024
_ERROR = re.compile(r"\w*(?:Error|Exception)\b")
_CHILD_MAIN = Path(__file__).with_name("child_main.py")


class ModuleSearch(Enum):
    """First arguments of the interpreter: how it finds `child_main`, and where it may look for modules."""

    PACKAGE = ("-m", "openclaw_rl.processes.child_main")
    # -P: Python would search the script's own folder for modules.
    BY_PATH = ("-P", str(_CHILD_MAIN))
    """The interpreter's environment may lack our packages."""
    # -I: neither the working directory nor our PYTHONPATH may shadow modules of the other environment.
    ISOLATED = ("-I", str(_CHILD_MAIN))
    """The same, and the interpreter ignores every PYTHON* variable."""


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """`python -m module arguments`, run as a child that ends with its parent (`child_main`)."""

    module: str
    arguments: tuple[str, ...] = ()
    python: str | None = None
    """Interpreter; this process's own when None."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of the parent's."""
    search: ModuleSearch = ModuleSearch.PACKAGE

    def argv(self) -> list[str]:
        variables = [word for name, value in self.environ.items() for word in ("--env", f"{name}={value}")]
        return [self.python or sys.executable, *self.search.value, *variables, self.module, *self.arguments]


class Lifeline(TypedDict):
    """Arguments of the call that creates a child process."""

    stdin: int
    start_new_session: bool


def lifeline() -> Lifeline:
    """Return what makes a new process end with this one and lead a process group of its own.

    Its standard input is a pipe. The pipe closes when this process ends, and `child_main` then ends the child.
    """
    return {"stdin": subprocess.PIPE, "start_new_session": True}


def end_group(pid: int) -> None:
    """Kill what a process left behind in the group that it led: a restart must find its GPU memory free."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def last_error(log_file: Path) -> str:
    """Return the last line of a process's log that names an error, else its last line, with the file's place.

    The line above the last one may be the cause: SGLang ends with a line about the processes that it kills.
    """
    lines = [line.strip() for line in _tail(log_file).split("\n") if line.strip()]
    errors = (line for line in reversed(lines) if _ERROR.search(line))
    said = next(errors, lines[-1] if lines else "it said nothing")
    return f"{without_data(said)[:LONGEST_LINE]} ({log_file})"


def _tail(log_file: Path) -> str:
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, log_file.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def free_port() -> int:
    """Return a free loopback port that SGLang accepts. Raises SettingsError if there is none."""
    for _ in range(_TRIES):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port <= HIGHEST_PORT:
            return port
    # The system may draw its free ports from above that limit alone.
    for port in random.sample(range(20_000, HIGHEST_PORT + 1), _TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SettingsError(f"no free port up to {HIGHEST_PORT} on 127.0.0.1")

"""Command line and lifeline of a supervised child process, for asyncio's supervisor and for slime's threads.

Standard library only: the launcher of a slime node imports it too.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypedDict

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


def last_line(log_file: Path) -> str:
    """Return the last line of a process's log file, or `it said nothing`."""
    lines = log_file.read_text(errors="replace").split("\n") if log_file.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")

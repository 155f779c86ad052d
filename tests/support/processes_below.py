"""Processes that a test looks for below another.

Each may end between two looks, so a process that is gone has no words, no life, and nothing to kill.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil


def below(pid: int) -> list[psutil.Process]:
    """Return every process below `pid`, none if `pid` itself is gone."""
    with suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def program(process: psutil.Process) -> str:
    """Return the file name of a process's program, `""` for one that ended."""
    with suppress(psutil.Error):
        return Path(next(iter(process.cmdline()), "")).name
    return ""


def lives(process: psutil.Process | int) -> bool:
    """Say whether a process, or its id, runs; one that ended and was not waited for does not."""
    with suppress(psutil.Error):
        process = psutil.Process(process) if isinstance(process, int) else process
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def browsers(family: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes of Chromium."""
    return [process for process in family if "chrom" in program(process)]


def kill(family: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to each process.

    The helpers of a browser end by themselves once the browser's first process has.
    """
    for process in family:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.kill()


def wait_for_end(family: Iterable[psutil.Process], seconds: float) -> None:
    """Wait until no process lives.

    Raises:
        AssertionError: One still lived after `seconds`.
    """
    left, end = list(family), time.monotonic() + seconds
    while left := [process for process in left if lives(process)]:
        assert time.monotonic() < end, [program(process) for process in left]
        time.sleep(0.05)

"""The C library's heap, set to give memory back, and the machine's free memory. The server, the embedded engine and the
trainer, which each run for weeks, use it.

Requests, replies and prompts come in all lengths. Buffers freed out of order leave holes that glibc keeps for later:
the memory in use is level, and the process grows as if it leaked. By default glibc even moves ever larger buffers into
that heap: after one freed mapping of 30 MB, every buffer below 30 MB goes there. Without glibc these functions have no
effect.
"""

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # malloc.h
_MAPPED_FROM = 4 << 20  # bytes: keys and values are larger, and the buffers of a step are smaller
"""Size from which a buffer is a mapping of its own, which the system gets back when it is freed."""
_EVERY_S = 60.0
_GROUP = Path("/sys/fs/cgroup")


def keep_large_buffers_apart() -> None:
    """Give large buffers mappings of their own. Call it before the first model is loaded."""
    mallopt = _libc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)


def give_back() -> None:
    """Return free pages to the system: 1 ms for a server's heap, longer for an engine's or a trainer's."""
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


def free_memory() -> int | None:
    """Return the bytes that programs can still take, within the control group's limit; None where nothing tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    with contextlib.suppress(OSError, ValueError):  # no control group of its own, or one without a limit ("max")
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return limit - used if free is None else min(free, limit - used)
    return free


async def give_back_forever() -> None:
    """Return free pages every minute, in a thread, forever. The server's task group owns this task."""
    while True:
        await asyncio.sleep(_EVERY_S)
        await asyncio.to_thread(give_back)


def _libc(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # not glibc
        return None
    return function

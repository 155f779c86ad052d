"""The C library's heap, told to give memory back: for the server, the embedded engine and the trainer, each of which is
a process that runs for weeks.

Requests, replies and prompts come in all lengths, so buffers freed out of order leave holes that glibc keeps for later:
what is in use is level, and the process grows all the same, as if it leaked. By default glibc even moves ever larger
buffers into that heap: freeing one mapping of 30 MB puts everything below 30 MB there from then on. Elsewhere than on
glibc there is nothing to do.
"""

import asyncio
import ctypes
from collections.abc import Callable

_M_MMAP_THRESHOLD = -3  # malloc.h
_MAPPED_FROM = 4 << 20
"""Bytes from which a buffer is a mapping of its own, gone when freed: keys and values are, what a step needs is not."""
_EVERY_S = 60.0


def keep_large_buffers_apart() -> None:
    """Before the first model is loaded."""
    mallopt = _libc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)


def give_back() -> None:
    """Return free pages to the system: a millisecond for a server's heap, some more for an engine's or a trainer's."""
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


async def give_back_forever() -> None:
    """Owned by the app: every minute, off the event loop."""
    while True:
        await asyncio.sleep(_EVERY_S)
        await asyncio.to_thread(give_back)


def _libc(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # not glibc
        return None
    return function

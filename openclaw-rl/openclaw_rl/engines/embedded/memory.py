"""The C library's heap, told to give memory back.

Replies come in all lengths, so buffers freed out of order leave holes that glibc keeps for later; a process that swaps
adapters for weeks would look as if it leaked. By default glibc even moves ever larger buffers into that heap: freeing
one mapping of 30 MB puts everything below 30 MB there from then on. Elsewhere than on glibc there is nothing to do.
"""

import ctypes
from collections.abc import Callable

_M_MMAP_THRESHOLD = -3  # malloc.h
_MAPPED_FROM = 4 << 20
"""Bytes from which a buffer is a mapping of its own, gone when freed: keys and values are, what a step needs is not."""


def keep_large_buffers_apart() -> None:
    """Before the first model is loaded."""
    mallopt = _libc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)


def give_back() -> None:
    """Return free pages to the system; some milliseconds."""
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


def _libc(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # not glibc
        return None
    return function

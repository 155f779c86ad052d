"""Memory that the C library keeps after a free, given back to the system.

Replies come in all lengths, so their buffers leave holes that glibc keeps for later; a process that swaps adapters for
weeks would look as if it leaked. Elsewhere than on glibc there is nothing to do.
"""

import ctypes


def give_back() -> None:
    """Return free pages to the system; some milliseconds."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return
    trim(0)

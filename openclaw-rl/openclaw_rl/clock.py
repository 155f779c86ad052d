"""The time that is written down: the wall clock's as this process started, and from then on a steady clock's.

Ages, leases and waiting times are differences of what stands in the ledger, so a wall clock that is set while the
server runs (by NTP, by hand, by a virtual machine that woke) must not end a lease or a conversation, nor keep one for
ever.
A machine's sleep counts: it is time that passed. The wall clock is read anew at the next start.
"""

import time
from collections.abc import Callable


def _steady() -> float:
    """Seconds since the machine started, its sleep included where the system can tell."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class SteadyClock:
    """Unix seconds. Never goes back, and never jumps."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _steady) -> None:
        self._steady = steady
        self._ahead = wall() - steady()

    def __call__(self) -> float:
        return self._ahead + self._steady()

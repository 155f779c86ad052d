"""How many CPU threads a step may use: all that are set, unless others want the cores.

A step has hundreds of short parallel sections that each end in a barrier. With an idle core per thread, two threads
take two thirds of the time of one; when something else runs (a trainer, a browser), every barrier waits until the late
thread gets its core back, and the step takes ten times as long. So both are measured as work goes on, by size of step,
and the faster is used; a crowded machine is tried again after a pause that doubles while nothing changes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

_WARM = 3
"""Steps of a size that are not measured: the first ones page the weights in, and pack them."""
_PROBE = 2
"""Steps of a probe; the fastest counts, since the first finds the other threads asleep."""
_WORSE, _BETTER = 1.3, 0.9
"""Many threads are given up, or taken up again, at this multiple of the time of one."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


@dataclass(slots=True)
class _Measured:
    """Seconds per unit of work, for steps of one size."""

    many: float | None = None
    one: float | None = None
    steps: int = 0
    is_crowded: bool = False
    probe_at: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    probed: int = 0
    """Steps of the probe that runs."""


class ThreadChooser:
    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._measured: dict[int, _Measured] = {}

    def choose(self, rows: int) -> int:
        """Threads for a step of `rows` tokens."""
        measured = self._of(rows)
        if measured.is_crowded:
            return self._most if self._clock() >= measured.probe_at else 1
        return 1 if measured.one is None and measured.steps >= _WARM else self._most

    def record(self, rows: int, threads: int, seconds: float, work: float) -> None:
        """A step took `seconds` for `work`, in any unit that grows as the time should (bytes read, say)."""
        if self._most == 1:
            return
        measured, cost = self._of(rows), seconds / work
        if threads == 1:
            measured.one = cost if measured.one is None else 0.7 * measured.one + 0.3 * cost
            return
        measured.steps += 1
        if measured.steps <= _WARM:
            return
        if measured.is_crowded and measured.one is not None:
            measured.probed += 1
            if cost < _BETTER * measured.one:
                measured.is_crowded, measured.many, measured.pause_s = False, cost, _FIRST_PAUSE_S
                measured.probed = 0
            elif measured.probed == _PROBE:
                measured.probed = 0
                measured.pause_s = min(2 * measured.pause_s, _LONGEST_PAUSE_S)
                measured.probe_at = self._clock() + measured.pause_s
            return
        measured.many = cost if measured.many is None else 0.5 * (measured.many + cost)
        if measured.one is not None and measured.many > _WORSE * measured.one:
            measured.is_crowded = True
            measured.probe_at = self._clock() + measured.pause_s

    def _of(self, rows: int) -> _Measured:
        return self._measured.setdefault(rows.bit_length(), _Measured())

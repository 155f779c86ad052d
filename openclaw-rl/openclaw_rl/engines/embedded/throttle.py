"""How many CPU threads a step may use: all that are set, unless others want the cores.

A step has hundreds of short parallel sections that each end in a barrier. With an idle core per thread, two threads
take two thirds of the time of one; when something else runs (a trainer, a browser), every barrier waits until the late
thread gets its core back, and the step takes ten times as long. So both are measured as work goes on, by size of step,
and the faster is used; a crowded machine is tried again after a pause that doubles while nothing changes.

How much background work a step may hold beside replies that matter more (a gate's scoring beside a chat).

A chat must not feel it: its tokens may come at most twice as far apart. What a prompt token costs differs a hundredfold
between a laptop's core and a GPU, and with whatever else runs, so it is measured as work goes on: steps with background
tokens against steps without. The least of a few counts; a step is late for many reasons, and early for none.
"""

import time
from collections import deque
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


_MOST_SLOWER, _LITTLE_SLOWER = 1.8, 1.4
"""Beyond the first a step holds half as many tokens from now on, below the second twice as many."""
_SAMPLES = 3
_BREATH = 8
"""Every so many steps one holds nothing of it: that is what the others are measured against."""
_LEAST, _FIRST = 4, 16


class BackgroundShare:
    """Used by the model thread alone. Sizes are powers of two from `_LEAST` to `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens = min(_FIRST, most)
        self._plain: dict[int, deque[float]] = {}
        """Seconds of the last steps without background work, by the size of the step."""
        self._mixed: list[float] = []
        """Seconds of the steps that held `_tokens`, over those of a plain one."""
        self._until_breath = _BREATH

    def tokens(self, decoding: int) -> int:
        """Prompt tokens of the next step beside `decoding` replies; 0: none this time."""
        return self._tokens if self._until_breath and self._of(decoding) else 0

    def record(self, decoding: int, tokens: int, seconds: float) -> None:
        """A step took `seconds`, `tokens` of it background work."""
        plain = self._of(decoding)
        if not tokens:
            plain.append(seconds)
            self._until_breath = _BREATH
            return
        self._until_breath -= 1
        if tokens != self._tokens or not plain:  # the end of a prompt
            return
        self._mixed.append(seconds / min(plain))
        if len(self._mixed) < _SAMPLES:
            return
        slower = min(self._mixed)
        self._mixed.clear()
        if slower > _MOST_SLOWER:
            self._tokens = max(_LEAST, self._tokens // 2)
        elif slower < _LITTLE_SLOWER:
            self._tokens = min(self._most, 2 * self._tokens)

    def _of(self, decoding: int) -> deque[float]:
        return self._plain.setdefault(decoding.bit_length(), deque(maxlen=_SAMPLES))

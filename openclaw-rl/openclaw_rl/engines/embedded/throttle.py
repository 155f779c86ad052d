"""Throttles of the model thread, both measured while it works: CPU threads per step, and background work per step.

`ThreadChooser`: a step has hundreds of short parallel sections that each end in a barrier. With an idle core per
thread, two threads take two thirds of the time of one. When another program uses a core (a trainer, a browser), every
barrier waits until the late thread gets its core back, and the step takes ten times as long. So both are measured by
size of step, and the faster is used. Many threads are tried again after a pause, which doubles while they stay slower.

`BackgroundShare`: background work (a gate's scoring) must not slow a chat beside it: the chat's tokens may come at most
twice as far apart. The cost of a prompt token differs a hundredfold between a laptop's core and a GPU, and with the
other programs that run. So steps with background tokens are measured against steps without. The least of a few
measurements counts: a step is late for many reasons, and early for no reason.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from openclaw_rl.backoff import Backoff

_WARM = 3
"""First steps of a size, which are not measured: they page the weights in, and pack them."""
_PROBE = 2
"""Steps of a probe. The fastest counts, because the first finds the other threads asleep."""
_WORSE, _BETTER = 1.3, 0.9
"""Multiples of the time of one thread at which many threads are given up, or used again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
"""Pauses between the probes of a crowded machine."""

_MOST_SLOWER, _LITTLE_SLOWER = 1.8, 1.4
"""Slowdowns of a step: beyond the first it holds half as many tokens from now on, below the second twice as many."""
_SAMPLES = 3
_BREATH = 8
"""Steps with background work before one without: the others are measured against that one."""
_LEAST, _FIRST = 4, 16


@dataclass(slots=True)
class _Measured:
    """Seconds per unit of work, for steps of one size."""

    many: float | None = None
    one: float | None = None
    steps: int = 0
    is_crowded: bool = False
    probe_at: float = 0.0
    pause: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S))
    probed: int = 0
    """Steps of the present probe."""


class ThreadChooser:
    """Number of CPU threads for the next step: `most`, or 1 while other programs use the cores."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._measured: dict[int, _Measured] = {}

    def choose(self, rows: int) -> int:
        """Return the number of threads for a step of `rows` tokens."""
        measured = self._of(rows)
        if measured.is_crowded:
            return self._most if self._clock() >= measured.probe_at else 1
        return 1 if measured.one is None and measured.steps >= _WARM else self._most

    def record(self, rows: int, threads: int, seconds: float, work: float) -> None:
        """Record a step of `seconds` for `work`, in a unit that grows as the time should (such as bytes read)."""
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
                measured.is_crowded, measured.many, measured.probed = False, cost, 0
                measured.pause.reset()
            elif measured.probed == _PROBE:
                measured.probed = 0
                measured.probe_at = self._clock() + measured.pause.next_s()
            return
        measured.many = cost if measured.many is None else 0.5 * (measured.many + cost)
        if measured.one is not None and measured.many > _WORSE * measured.one:
            measured.is_crowded = True
            measured.probe_at = self._clock() + measured.pause.next_s()

    def _of(self, rows: int) -> _Measured:
        return self._measured.setdefault(rows.bit_length(), _Measured())


class BackgroundShare:
    """Number of background tokens that a step may hold: a power of two from `_LEAST` to `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens = min(_FIRST, most)
        self._plain: dict[int, deque[float]] = {}
        """Seconds of the latest steps without background work, by the size of the step."""
        self._mixed: list[float] = []
        """Seconds of the steps that held `_tokens`, divided by those of a plain step."""
        self._until_breath = _BREATH

    def tokens(self, decoding: int) -> int:
        """Return the background tokens of the next step beside `decoding` replies; 0: the step is a plain one."""
        return self._tokens if self._until_breath and self._of(decoding) else 0

    def record(self, decoding: int, tokens: int, seconds: float) -> None:
        """Record a step of `seconds` with `tokens` of background work."""
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

"""How much background work a step may hold beside replies that matter more (a gate's scoring beside a chat).

A chat must not feel it: its tokens may come at most twice as far apart. What a prompt token costs differs a hundredfold
between a laptop's core and a GPU, and with whatever else runs, so it is measured as work goes on: steps with background
tokens against steps without. The least of a few counts; a step is late for many reasons, and early for none.
"""

from collections import deque

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

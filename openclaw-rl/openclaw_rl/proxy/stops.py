"""Finds stop strings in a stream of text, and says which tokens they cut off."""

from collections.abc import Sequence


class StopMatcher:
    """Promises: no text of a stop string, or behind it, is ever released; text that may still become one is held
    back. O(1) per token.
    """

    __slots__ = ("_ends", "_held", "_out", "_stops", "is_stopped", "kept")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._out = 0
        """Characters released."""
        self._ends: list[int] = []
        """Characters decoded after each token."""
        self.is_stopped = False
        self.kept = 0
        """Tokens before the first one that the match cut into; valid once `is_stopped`."""

    def feed(self, text: str) -> str:
        """Take one token's text; give what may be shown."""
        if not self._stops:
            return text
        if self.is_stopped:
            return ""
        buffer = self._held + text
        self._ends.append(self._out + len(buffer))
        found = [at for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            cut = min(found)
            self.is_stopped = True
            self.kept = self._tokens_before(self._out + cut)
            self._held = ""
            return buffer[:cut]
        hold = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - hold :]
        self._out += len(buffer) - hold
        return buffer[: len(buffer) - hold]

    def finish(self) -> str:
        """No more text comes: what was held is text."""
        held, self._held = self._held, ""
        return held

    def _tokens_before(self, position: int) -> int:
        """Tokens whose text lies wholly before `position`."""
        count = next(i for i, end in enumerate(self._ends) if end > position)
        # A token that showed nothing holds the first bytes of the next token's character: it is cut with it.
        while (
            count > 0 and self._ends[count - 1] == position and self._ends[count - 1] == _before(self._ends, count - 1)
        ):
            count -= 1
        return count


def _before(ends: list[int], index: int) -> int:
    return ends[index - 1] if index else 0


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0

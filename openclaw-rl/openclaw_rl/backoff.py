"""Pauses between attempts: each is twice as long as the one before, up to a limit."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """The pauses of one loop of attempts. `next_s` gives `first_s`, 2 · `first_s`, 4 · `first_s` … `longest_s`."""

    first_s: float
    longest_s: float
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.longest_s:
            raise ValueError(f"backoff from {self.first_s} s to {self.longest_s} s")
        self._next_s = self.first_s

    def next_s(self) -> float:
        """Return the pause before the next attempt, in seconds. The following pause is twice as long."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self.longest_s)
        return pause_s

    def reset(self) -> None:
        """Start again at `first_s`, because an attempt succeeded."""
        self._next_s = self.first_s

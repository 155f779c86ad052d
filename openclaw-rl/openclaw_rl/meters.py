"""Counters and means of what happens beside the ledger: hints not found, teachers that failed, the scorer's noise.

One object, made by `app.py` and handed to whoever counts; `/metrics` and `/healthz` read it. It starts empty with each
server: the ledger is the memory, this tells how a run goes. Event loop only.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True)
class Mean:
    total: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


class Meters:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.means: dict[str, Mean] = {}
        self._failing: dict[str, tuple[int, str]] = {}

    def count(self, name: str) -> None:
        self.counts[name] += 1

    def observe(self, name: str, value: float) -> None:
        mean = self.means.setdefault(name, Mean())
        mean.total += value
        mean.count += 1

    def worked(self, part: str) -> None:
        """The part does what it should again."""
        self._failing.pop(part, None)

    def failed(self, part: str, error: str) -> None:
        times, _ = self._failing.get(part, (0, ""))
        self._failing[part] = (times + 1, error)

    def problems(self, *, after: int = 3) -> list[str]:
        """Parts that failed at least `after` times in a row, in words."""
        return [
            f"{part}: failed {times} times in a row, last: {error}"
            for part, (times, error) in sorted(self._failing.items())
            if times >= after
        ]

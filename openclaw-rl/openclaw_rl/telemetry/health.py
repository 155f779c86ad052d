"""Counters and means of what happens beside the ledger: hints not found, teachers that failed, the scorer's noise; and
which parts fail now.

One object, made with the core and handed to whoever counts; `/metrics` and `/healthz` read it. It starts empty with
each server: the ledger is the memory, this tells how a run goes. Event loop only.

A part that fails says so in one log line, whatever number of requests meet it, and in one more when it works again: the
callers say what happened to each call, and at `OUT_AFTER` failures in a row the part is out of order.
"""

from collections import Counter
from dataclasses import dataclass
from time import monotonic

import structlog

log = structlog.get_logger()

OUT_AFTER = 3
"""One failed call is not yet a part out of order: a retry mends it, and nobody needs to know."""


@dataclass(slots=True)
class Mean:
    total: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class _Failing:
    since: float
    times: int = 0
    error: str = ""
    is_failing: bool = False

    def __str__(self) -> str:
        return f"failed {'once' if self.times == 1 else f'{self.times} times in a row, last'}: {self.error}"


class Health:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.means: dict[str, Mean] = {}
        self._failing: dict[str, _Failing] = {}
        self._failures: Counter[str] = Counter()

    def count(self, name: str) -> None:
        self.counts[name] += 1

    def observe(self, name: str, value: float) -> None:
        mean = self.means.setdefault(name, Mean())
        mean.total += value
        mean.count += 1

    def ok(self, part: str) -> None:
        """The part does what it should again."""
        if not self._failing:
            return
        failing = self._failing.pop(part, None)
        if failing is not None and failing.is_failing:
            log.info("part_works_again", part=part, failures=failing.times, for_s=round(monotonic() - failing.since, 1))

    def failed(self, part: str, error: str, *, at_once: bool = False) -> None:
        """at_once: it is out of order by this one failure."""
        self._failures[part] += 1
        failing = self._failing.setdefault(part, _Failing(monotonic()))
        failing.times, failing.error = failing.times + 1, error
        if not failing.is_failing and (at_once or failing.times >= OUT_AFTER):
            failing.is_failing = True
            log.warning("part_fails", part=part, failures=failing.times, error=error)

    def is_failing(self, part: str) -> bool:
        failing = self._failing.get(part)
        return failing is not None and failing.is_failing

    @property
    def failures(self) -> dict[str, int]:
        """All since the start, by part."""
        return dict(self._failures)

    def problems(self) -> list[str]:
        """Parts out of order, in words."""
        return [f"{part}: {failing}" for part, failing in sorted(self._failing.items()) if failing.is_failing]

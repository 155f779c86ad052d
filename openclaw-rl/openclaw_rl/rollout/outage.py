"""Whether it is single turns that fail, or whoever is asked about them: the judge, the teacher.

While all fail the turns wait, none uses up its tries, and one after the other is tried until one works; then all are
taken up at once.
"""

import time
from collections import Counter

from openclaw_rl.rollout.pace import Pace

_OUT_AFTER = 3
"""Turns that failed one after the other, and nothing worked in between: it is the judge, or the teacher."""
_OUTAGE_TRIES = 500
"""Of one turn while everything fails: hours. Should it be the turns after all, they do not wait for ever."""


class Outage:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._failed: set[str] = set()
        """Turns that failed since anything worked."""
        self._tries: Counter[str] = Counter()
        self._tried: set[str] = set()
        """One after the other, so that none which always fails stands before the rest."""
        self._rest_s = pace.first_rest_s
        self._rests_until = 0.0
        self.is_new = False

    @property
    def is_on(self) -> bool:
        return len(self._failed) >= _OUT_AFTER

    @property
    def rest_s(self) -> float:
        return max(self._rests_until - time.monotonic(), 0.0)

    @property
    def tried(self) -> frozenset[str]:
        return frozenset(self._tried)

    def all_were_tried(self) -> None:
        self._tried.clear()

    def takes(self, turn_id: str) -> bool:
        """A turn failed: whether that is put down to an outage, and not to the turn."""
        was_on = self.is_on
        if not was_on:
            self._failed.add(turn_id)
            self._rest_s = self._pace.first_rest_s
        self.is_new = self.is_on and not was_on
        if not self.is_on:
            return False
        self._tried.add(turn_id)
        self._rests_until = time.monotonic() + self._rest_s
        self._rest_s = min(2 * self._rest_s, self._pace.longest_outage_rest_s)
        self._tries[turn_id] += 1
        return self._tries[turn_id] <= _OUTAGE_TRIES

    def ends(self) -> bool:
        """Something worked; whether that ends an outage."""
        was_on = self.is_on
        self._failed.clear()
        self._tries.clear()
        self._tried.clear()
        return was_on

"""Which versions the tip descends from, and how many commits lie between.

A child's number is larger than its parent's, so a walk from the tip finds any ancestor before it passes its number: a
lease reads a few rows, however long the run is.
"""

import sqlite3
from collections.abc import Iterator


class Ancestry:
    """The way from `tip` to the base, read as far as it is asked about. Good for one transaction."""

    def __init__(self, db: sqlite3.Connection, tip: int) -> None:
        self._db, self.tip = db, tip
        self._depths: dict[int, int] = {}
        self._steps = self._walk()
        self._lowest = tip + 1

    def __contains__(self, version: int) -> bool:
        """Whether `version` is the tip or an ancestor of it."""
        while self._lowest > version:
            step = next(self._steps, None)
            if step is None:
                break
            self._lowest, depth = step
            self._depths[self._lowest] = depth
        return version in self._depths

    def staleness(self, version: int) -> int:
        """Commits between an ancestor and the tip. A version that only serves old weights again is no commit."""
        assert version in self
        assert self.tip in self
        return self._depths[self.tip] - self._depths[version]

    def after(self, version: int) -> list[int]:
        """The versions between an ancestor (not included) and the tip (included), newest first."""
        assert version in self
        return [number for number in sorted(self._depths, reverse=True) if number > version]

    def _walk(self) -> Iterator[tuple[int, int]]:
        number: int | None = self.tip
        while number is not None:
            parent, depth = self._db.execute(
                "SELECT parent, depth FROM version WHERE weight_version = ?", (number,)
            ).fetchone()
            yield number, depth
            number = parent

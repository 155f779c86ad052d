"""One thread per tracker, with a short line of work in front of it.

A tracker that is slow, hangs or fails holds up its own thread alone. The caller offers work, and keeps it where the
line is full: the ledger has every step. The thread notes in a file how far it came, after each piece of work. So a
crash may repeat one step and loses none.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import structlog

from openclaw_rl.backoff import Backoff
from openclaw_rl.data_dir import write_private
from openclaw_rl.telemetry.trackers.base import TrackedRun, TrackedSample, Tracker

log = structlog.get_logger()

ROOM = 64
"""Pieces of work that wait for one tracker."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""Pauses before a tracker that failed is made anew."""


@dataclass(frozen=True, slots=True)
class Work:
    """The figures of one version, or marks on a version whose figures were sent before."""

    version: int
    at: float
    figures: Mapping[str, float]
    samples: tuple[TrackedSample, ...] = ()
    is_mark: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """The newest version that was sent, and the sent versions that were marked as rolled back."""

    sent: int = 0
    marked: frozenset[int] = frozenset()

    @classmethod
    def read(cls, path: Path) -> "Progress":
        """Read the file; without a readable one, start at the first version."""
        try:
            found = orjson.loads(path.read_bytes())
            return cls(int(found["sent"]), frozenset(map(int, found["marked"])))
        except (OSError, KeyError, TypeError, ValueError):
            return cls()

    def after(self, work: Work) -> "Progress":
        kept = {version for version in self.marked if version < work.version} if not work.is_mark else self.marked
        if "version/rolled_back" in work.figures:
            kept = kept | {work.version}
        return Progress(self.sent if work.is_mark else work.version, frozenset(kept))

    def write(self, path: Path) -> None:
        write_private(path, orjson.dumps({"sent": self.sent, "marked": sorted(self.marked)}))


class TrackerThread:
    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run: TrackedRun,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.fault: str | None = None
        """Words about the newest failure; None while the tracker works."""
        self._make, self._run_of, self._clock = make, run, clock
        self._path = run.folder / f"{name}.json"
        self.progress = Progress.read(self._path)
        self._pauses = Backoff(first_pause_s, max(first_pause_s, LONGEST_PAUSE_S))
        self._line: deque[Work] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._busy_since: float | None = None
        # A daemon: a tracker that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def offer(self, work: Work) -> bool:
        """Put work in the line; False: the line is full."""
        with self._changed:
            if self._is_closed or len(self._line) >= ROOM:
                return False
            self._line.append(work)
            self._changed.notify()
            return True

    @property
    def busy_s(self) -> float:
        """Seconds that the tracker's running call has taken; 0 between calls."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Take no more work. The thread ends after the waiting work, or after the first failure."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False: it still runs. Blocks."""
        self._thread.join(max(timeout_s, 0))
        return not self._thread.is_alive()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        tracker: Tracker | None = None
        while True:
            try:
                self._busy_since = self._clock()
                if tracker is None:
                    tracker = self._make()
                    tracker.start(self._run_of)
                self._busy_since = None
                if (work := self._next()) is None:
                    break
                self._busy_since = self._clock()
                self._give(tracker, work)
            except Exception as error:  # a tracker is code of others, and its fault must stay in this thread
                self._busy_since = None
                self.fault = f"{type(error).__name__}: {error}"
                self._dropped(tracker)
                tracker = None
                if self._pause():
                    break
        self._dropped(tracker)

    def _next(self) -> Work | None:
        """Wait for work, and return it without taking it out of the line; None: the thread has to end."""
        with self._changed:
            if not self._line:
                self.fault = None
            self._changed.wait_for(lambda: self._line or self._is_closed)
            return self._line[0] if self._line else None

    def _give(self, tracker: Tracker, work: Work) -> None:
        tracker.step(work.version, work.at, work.figures)
        if work.samples:
            tracker.samples(work.version, work.at, work.samples)
        self.progress = self.progress.after(work)
        self.progress.write(self._path)
        self._pauses.reset()
        self.fault = None
        with self._changed:
            self._line.popleft()

    def _dropped(self, tracker: Tracker | None) -> None:
        if tracker is None:
            return
        try:
            tracker.close()
        except Exception as error:
            log.warning("tracker_not_closed", tracker=self.name, error=repr(error))

    def _pause(self) -> bool:
        """Wait before the next try. Return True if the thread has to end instead."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed, self._pauses.next_s())

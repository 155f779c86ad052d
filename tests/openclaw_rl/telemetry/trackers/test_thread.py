"""A tracker that fails, hangs or is slow costs its own thread alone, and no step."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from openclaw_rl.settings import TrackingSettings
from openclaw_rl.telemetry.trackers.base import TrackedRun, Tracker
from openclaw_rl.telemetry.trackers.thread import ROOM, Progress, TrackerThread, Work

LONG_S = 30.0
"""Only a fault makes a test wait that long."""


class Notes(Tracker):
    """Keeps what it got; may fail a number of times, or wait before each step."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.fails = 0
        self.starts_fail = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.failed = threading.Event()
        self.in_call = threading.Event()

    def start(self, run: TrackedRun) -> None:
        if self.starts_fail:
            self.starts_fail -= 1
            self.failed.set()
            raise RuntimeError("no such host")

    def step(self, version: int, at: float, figures: Mapping[str, float]) -> None:
        self.in_call.set()
        assert self.goes_on.wait(LONG_S)
        if self.fails:
            self.fails -= 1
            self.failed.set()
            raise OSError("disk full")
        self.got.append(version)


def thread_of(notes: Notes, folder: Path, make: Callable[[], Tracker] | None = None) -> TrackerThread:
    run = TrackedRun("run", folder, TrackingSettings(), {})
    return TrackerThread("notes", make or (lambda: notes), run, first_pause_s=0.001)


def work(version: int, **figures: float) -> Work:
    return Work(version, 1.0, figures)


def ended(thread: TrackerThread) -> None:
    thread.stop()
    assert thread.join(LONG_S)


def test_steps_arrive_in_order_and_the_place_is_kept_for_the_next_start(tmp_path: Path) -> None:
    notes = Notes()
    thread = thread_of(notes, tmp_path)
    assert all(thread.offer(work(version)) for version in (1, 2, 3))
    ended(thread)
    assert notes.got == [1, 2, 3]
    assert thread_of(Notes(), tmp_path).progress == Progress(3)


def test_a_failure_is_told_and_the_same_step_comes_again(tmp_path: Path) -> None:
    notes = Notes()
    notes.fails = 3
    thread = thread_of(notes, tmp_path)
    thread.offer(work(1))
    assert notes.failed.wait(LONG_S)
    while not notes.got:
        assert thread.fault in (None, "OSError: disk full")
    ended(thread)
    assert notes.got == [1]
    assert thread.fault is None


def test_a_tracker_that_cannot_start_loses_no_step(tmp_path: Path) -> None:
    notes = Notes()
    notes.starts_fail = 2
    thread = thread_of(notes, tmp_path)
    thread.offer(work(1))
    while not notes.got:
        assert thread.is_alive
    ended(thread)
    assert notes.got == [1]


def test_a_tracker_that_hangs_fills_its_line_and_holds_up_nobody(tmp_path: Path) -> None:
    notes = Notes()
    notes.goes_on.clear()
    thread = thread_of(notes, tmp_path)
    taken = [thread.offer(work(version)) for version in range(1, ROOM + 10)]
    assert (taken.count(True), taken[ROOM:]) == (ROOM, [False] * 9)
    assert notes.in_call.wait(LONG_S)
    assert thread.busy_s > 0
    thread.stop()
    assert not thread.join(0)  # the server's stop goes on without it
    notes.goes_on.set()
    assert thread.join(LONG_S)
    assert notes.got == list(range(1, ROOM + 1))


def test_a_stop_does_not_wait_for_a_tracker_that_fails(tmp_path: Path) -> None:
    notes = Notes()
    notes.fails = 10**9
    thread = TrackerThread(
        "notes", lambda: notes, TrackedRun("run", tmp_path, TrackingSettings(), {}), first_pause_s=3600
    )
    thread.offer(work(1))
    assert notes.failed.wait(LONG_S)
    ended(thread)
    assert thread_of(Notes(), tmp_path).progress == Progress(0), "the next start sends it"


def test_marks_do_not_move_the_place_and_go_when_a_number_is_used_again() -> None:
    kept = Progress(5).after(Work(3, 1.0, {"version/rolled_back": 1.0}, is_mark=True))
    assert kept == Progress(5, frozenset({3}))
    assert kept.after(work(6)) == Progress(6, frozenset({3}))
    assert kept.after(work(2)) == Progress(2)  # an older copy of the ledger


def test_a_progress_file_that_cannot_be_read_is_a_new_beginning(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{")
    assert thread_of(Notes(), tmp_path).progress == Progress()

"""A trainer's silence: by a clock of the test's own, and over a real process that is silent.

(A lease that runs out: `tests/degradation/test_trainer.py`.)
"""

import asyncio
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from openclaw_rl.processes.command import ChildCommand
from openclaw_rl.processes.supervisor import Child, ChildStatus
from openclaw_rl.server import trainer_watchdog
from openclaw_rl.server.trainer_watchdog import HeartbeatMonitor, SilenceMonitor, TrainerHeartbeat, end_when_hung
from openclaw_rl.telemetry.health import Health


class Hours:
    """A process and its heartbeat, both as old as the test sets."""

    def __init__(self, *, lease_s: float = 900.0) -> None:
        self.pid: int | None = 1
        self.now, self.started_at, self.spoke_at = 0.0, 0.0, float("-inf")
        self.ended_after: list[float] = []
        self.health = Health()
        self.silence = HeartbeatMonitor(self, self.health, self, patience_s=lease_s)  # type: ignore[arg-type]

    @property
    def up_s(self) -> float:
        return 0.0 if self.pid is None else self.now - self.started_at

    @property
    def age_s(self) -> float:
        return self.now - self.spoke_at

    def status(self) -> ChildStatus:
        return ChildStatus("trainer", self.pid, restarts=0, last_exit=None)

    def kill_hung(self) -> None:
        self.ended_after.append(self.now - self.started_at)
        self.pid = None

    def starts(self) -> None:
        self.pid, self.started_at = len(self.ended_after) + 2, self.now

    def passes(self, minutes: int, *, speaks: bool = False) -> list[str]:
        """Look twice a minute for this time, and return the problems at the end."""
        for _ in range(2 * minutes):
            self.now += 30
            if speaks:
                self.spoke_at = self.now
            self.silence.look()
        return self.health.problems()


def test_a_trainer_that_says_nothing_is_told_ended_and_given_more_time() -> None:
    it = Hours()
    with capture_logs() as lines:
        assert it.passes(4) == []
        (told,) = it.passes(2)
        assert told == "trainer's process: failed once: not a word for 300 s: it loads its model, or hangs"
        assert it.ended_after == []
        (told,) = it.passes(10)
        assert told.endswith("not a word for 900 s: it was ended and started again")
        it.starts()
        it.passes(40)
        it.starts()
        (told,) = it.passes(80)
        assert it.ended_after == [900, 1800, 3600]
        it.starts()
        assert it.passes(1, speaks=True) == [], "it has loaded"
        (told,) = it.passes(6)  # and hangs later, between two batches
        assert "it loads its model, or hangs" in told
        it.passes(10)
        assert it.ended_after[3] == 30 + 30 + 900, "its first patience again"
    assert [line["event"] for line in lines].count("part_fails") == 2
    assert [line["event"] for line in lines].count("part_works_again") == 1


def test_one_that_speaks_or_is_not_there_is_left_alone() -> None:
    it = Hours()
    assert it.passes(60, speaks=True) == []
    it.pid = None
    assert it.passes(60) == []
    assert it.ended_after == []


def test_what_its_predecessor_said_is_no_word_of_its_own() -> None:
    it = Hours()
    it.passes(20)
    it.starts()
    it.spoke_at = it.now - 60  # it was heard, and then it was ended
    assert "it was ended" in it.passes(1)[0], "no word of the new one yet"


class NoLeases:
    async def overdue(self) -> str | None:
        return None

    async def revoke(self, *, trainer: str | None = None, reason: str) -> bool:
        raise AssertionError("there is nothing to revoke")


async def test_a_process_that_hangs_before_its_first_batch_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_trainer.py").write_text("import time; time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("openclaw_rl.server.trainer_watchdog.LONGEST_WATCH_S", 0.01)
    monkeypatch.setattr("openclaw_rl.server.trainer_watchdog.SILENT_S", 0.1)
    health = Health()
    child = Child("trainer", ChildCommand("a_trainer"), log_file=tmp_path / "log", stop_grace_s=1.0)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(child.run())
        watching = tasks.create_task(end_when_hung(child, NoLeases(), health, TrainerHeartbeat(), lease_s=0.1))
        async with asyncio.timeout(120):
            while child.status().restarts < 1:
                await asyncio.sleep(0.01)
        assert child.status().last_exit == -9
        assert health.problems()[0].startswith("trainer's process: failed")
        watching.cancel()
        await child.stop()
        await running


def test_the_silence_of_another_programs_trainer_is_a_problem_and_one_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, alerts, health = [1000.0], [], Health()
    monkeypatch.setattr(trainer_watchdog.time, "monotonic", lambda: clock[0])
    heartbeat = TrainerHeartbeat()
    monitor = SilenceMonitor(health, heartbeat, lambda event, **fields: alerts.append((event, fields)))
    for clock[0] in (1030.0, 1290.0):
        monitor.look()
        assert health.problems() == []  # it starts
    for clock[0] in (1301.0, 1331.0):
        monitor.look()
    assert health.problems() == ["trainer's process: failed once: not a word for 301 s: it starts, hangs, or is gone"]
    assert alerts == [("trainer_silent", {"silent_s": 301})]
    heartbeat.heard()
    monitor.look()
    assert health.problems() == []

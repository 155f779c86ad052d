"""A trainer that hangs holds its batch no longer than a lease: the server ends it, and starts it again.

(A trainer that is killed, at every point of a step: `tests/integration/test_kill.py`, and `kill_real.py` on the real
one. A step that hangs in a process that still runs: `tests/openclaw_rl/trainers/test_loop.py`.)
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from openclaw_rl.hung_trainer import end_when_hung
from openclaw_rl.meters import Meters
from openclaw_rl.supervisor import Child

SLEEPER = "import sys, time; open(sys.argv[1], 'a').write('started\\n'); time.sleep(600)\n"


class OverdueLedger:
    """As the ledger is while a trainer lets its lease run out; `test_leases.py` shows the real one name it."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.revoked: list[str] = []

    async def overdue(self) -> str | None:
        return self.name

    async def revoke(self, *, trainer: str | None = None, reason: str) -> bool:
        self.revoked.append(str(trainer))
        self.name = None
        return True


async def test_a_stopped_trainer_is_ended_and_started_again_and_its_batch_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_trainer.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    seen, ledger = tmp_path / "seen", OverdueLedger()
    meters = Meters()
    child = Child("trainer", "a_trainer", [str(seen)], python=None, log_file=tmp_path / "log", stop_grace_s=1.0)

    async def starts(count: int) -> None:
        async with asyncio.timeout(30):
            while not seen.exists() or seen.read_text().count("started") < count:
                await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(child.run())
        watching = tasks.create_task(end_when_hung(child, ledger, meters, lease_s=0.2))
        await starts(1)
        pid = child.status().pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        ledger.name = "somebody else's"
        await asyncio.sleep(0.3)
        assert child.status().pid == pid, "another trainer's lease is not ours to end"
        ledger.name = "local@here"
        await starts(2)
        assert ledger.revoked == ["local@here"]
        assert meters.problems() == ["trainer: failed once: it let its lease run out, was ended and started again"]
        assert child.status().pid not in (None, pid)
        watching.cancel()
        await child.stop()
        await running

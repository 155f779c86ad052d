"""Trainer killed, ending at each start, hanging, or failing at each step.

Chats never notice. The batch waits again and is trained on once. The server reports the fault until the next step is
committed.

(Killed at every point of a step: `tests/integration/test_kill.py`, and `scripts/e2e/kill_real.py` with the real
trainer. A step that hangs in a process that still runs: `tests/openclaw_rl/trainers/test_loop.py`.)
"""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from stub_trainer import HELD, shim

from openclaw_rl.processes.command import ChildCommand
from openclaw_rl.processes.supervisor import Child
from openclaw_rl.server.trainer_watchdog import TrainerHeartbeat, end_when_hung
from openclaw_rl.telemetry.health import Health

THANKS = "Thanks, that is perfect!"


class Training:
    """A server with a local trainer of its own that fails on command."""

    def __init__(self, here: Any) -> None:
        self.here, self._data = here, here.server.data_dir
        self.turns: list[str] = []

    def fails(self, how: str) -> None:
        written = self._data / "trainer.how.new"
        written.write_text(how)
        written.replace(self._data / "trainer.how")  # the trainer reads it at any moment

    async def batch(self) -> None:
        for _ in range(2):
            self.turns.append(await self.here.turn(THANKS, f"s{len(self.turns)}"))

    async def held(self) -> int:
        """Wait until a step is running, and return its process's id."""
        held = self._data / HELD

        async def is_held() -> bool:
            return held.exists() and held.read_text() == str(await self.pid())

        await self.here.until(is_held)
        return int(held.read_text())

    async def pid(self) -> int | None:
        (trainer,) = (await self.here.admin("/v1/admin/status"))["children"]
        return trainer["pid"]  # type: ignore[no-any-return]

    async def is_said(self, problem: str) -> bool:
        return any(re.match(problem, found) for found in await self.here.problems())

    async def said(self, problem: str) -> None:
        """Wait until `/healthz` lists the problem, while chats go on."""

        async def is_so() -> bool:
            return await self.is_said(problem)

        await self.here.until(is_so)
        assert (await self.here.chat(session="meanwhile")).status_code == 200

    async def until_version(self, number: int) -> None:
        """Wait until this version serves; each batch so far was trained on in one version, in order."""

        async def serves() -> bool:
            return bool((await self.here.admin("/v1/admin/status"))["serving"] == number)

        await self.here.until(serves)
        trained = [(await self.here.admin(f"/v1/turns/{turn}"))["trained_in"] for turn in self.turns]
        assert trained == [1 + n // 2 for n in range(len(self.turns))]
        await self.here.until_well()

    async def metric(self, line: str) -> bool:
        return f"{line}.0" in (await self.here.admin("/metrics")).splitlines()


@asynccontextmanager
async def training(place: Any, folder: Path, *, lease_s: float = 600.0) -> AsyncIterator[Training]:
    folder.mkdir()
    settings = {
        "trainer__kind": "local",
        "trainer__python": str(shim(folder / "python")),
        "training__batch_size": 2,
        "training__lease_s": lease_s,
        "judge__votes": 1,
        "judge__quorum": 1,
    }
    async with place(folder, **settings) as here:
        yield Training(here)


async def killed_and_ending(place: Any, folder: Path) -> None:
    async with training(place, folder) as trainer:
        here = trainer.here
        trainer.fails("hold")
        await trainer.batch()
        pid = await trainer.held()
        os.kill(pid, signal.SIGKILL)

        async def is_said_or_over() -> bool:  # for the second before it is started again
            return await trainer.is_said("trainer: not running, last exit -9") or await trainer.pid() not in (None, pid)

        await here.until(is_said_or_over)
        trainer.fails("")
        await trainer.until_version(1)
        assert (here.lines["child_exited"], here.lines["trainer_hangs"]) == (1, 0)
        assert await trainer.metric('openclaw_rl_restarts_total{part="trainer"} 1')

        trainer.fails("hold")
        await trainer.batch()
        pid = await trainer.held()
        trainer.fails("exit 3")
        os.kill(pid, signal.SIGKILL)
        await trainer.said(r"trainer: ended \d+ times soon after its start, exit 3")
        assert await trainer.metric('openclaw_rl_out_of_order{part="trainer"} 1')
        trainer.fails("")
        await trainer.until_version(2)
        assert (here.lines["child_exited"], here.lines["child_works_again"]) == (1 + 3, 1)


async def hung(place: Any, folder: Path) -> None:
    # Its lease runs out: were the machine to stand still for as long, another trainer would be ended the same way.
    async with training(place, folder, lease_s=5.0) as trainer:
        here = trainer.here
        trainer.fails("hold")
        await trainer.batch()
        os.kill(await trainer.held(), signal.SIGSTOP)
        ended = "it let its lease run out, was ended and started again"
        await trainer.said(rf"trainer: failed (once|\d+ times in a row, last): {ended}")
        assert await trainer.metric('openclaw_rl_out_of_order{part="trainer"} 1')
        trainer.fails("")
        await trainer.until_version(1)
        assert here.lines["trainer_hangs"] >= 1
        assert (here.lines["part_fails"], here.lines["part_works_again"]) == (1, 1)
        assert not await trainer.metric('openclaw_rl_out_of_order{part="trainer"} 1')


async def failing_steps(place: Any, folder: Path) -> None:
    async with training(place, folder) as trainer:
        here = trainer.here
        for number, (how, why) in enumerate(
            (("full", "[Errno 28] No space left on device"), ("no step", "the gradient is not finite")), start=1
        ):
            trainer.fails(how)
            await trainer.batch()
            await trainer.said(r"trainer: failed \d+ times in a row")
            assert (await here.problems())[0].endswith(f"last: {why}")
            assert await trainer.metric('openclaw_rl_out_of_order{part="trainer"} 1')
            trainer.fails("")
            await trainer.until_version(number)
            assert (here.lines["part_fails"], here.lines["part_works_again"]) == (number, number)
        assert here.lines["child_exited"] == 0


async def test_a_trainer_that_fails_costs_no_chat_and_no_turn_and_is_said(place: Any, tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as servers:
        servers.create_task(killed_and_ending(place, tmp_path / "killed"))
        servers.create_task(failing_steps(place, tmp_path / "failing"))
        servers.create_task(hung(place, tmp_path / "hung"))


SLEEPER = "import sys, time; open(sys.argv[1], 'a').write('started\\n'); time.sleep(600)\n"


class OverdueLedger:
    """The ledger while a trainer lets its lease run out; `test_leases.py` shows that the real one names it."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.revoked: list[str] = []

    async def overdue(self) -> str | None:
        return self.name

    async def revoke(self, *, trainer: str | None = None, reason: str) -> bool:
        self.revoked.append(str(trainer))
        self.name = None
        return True


async def test_only_our_own_trainer_is_ended_when_its_lease_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_trainer.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    seen, ledger = tmp_path / "seen", OverdueLedger()
    health = Health()
    child = Child("trainer", ChildCommand("a_trainer", (str(seen),)), log_file=tmp_path / "log", stop_grace_s=1.0)

    async def starts(count: int) -> int:
        """Wait until the trainer has started this often; its process id is known a moment after the start."""
        async with asyncio.timeout(120):
            while not seen.exists() or seen.read_text().count("started") < count or not child.status().pid:
                await asyncio.sleep(0.02)
        return child.status().pid or 0

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(child.run())
        watching = tasks.create_task(end_when_hung(child, ledger, health, TrainerHeartbeat(), lease_s=0.2))
        pid = await starts(1)
        os.kill(pid, signal.SIGSTOP)
        ledger.name = "somebody else's"
        await asyncio.sleep(0.3)
        assert child.status().pid == pid, "another trainer's lease is not ours to end"
        ledger.name = "local@here"
        again = await starts(2)
        assert ledger.revoked == ["local@here"]
        assert health.problems() == ["trainer: failed once: it let its lease run out, was ended and started again"]
        assert again != pid
        health.ok("trainer")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

        # The new one starts, and what the old one leased runs out: that is not the new one's doing.
        pid, ledger.name = child.status().pid, "local@here"
        monkeypatch.setattr("openclaw_rl.server.trainer_watchdog.LONGEST_WATCH_S", 0.01)
        watching = tasks.create_task(end_when_hung(child, ledger, health, TrainerHeartbeat(), lease_s=60.0))
        async with asyncio.timeout(120):
            while len(ledger.revoked) < 2:
                await asyncio.sleep(0.01)
        assert child.status().pid == pid
        assert health.problems() == []
        watching.cancel()
        await child.stop()
        await running

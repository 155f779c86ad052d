"""Watchdog of the trainer's process: it ends a local trainer that hangs, and reports it until the trainer recovers.

It looks at two things. The ledger knows whether the trainer let its lease run out; that is out of order until the next
commit. The heartbeat knows when the trainer last called this server; silence is out of order until the next call.

A healthy trainer asks for a batch every few seconds, and renews a lease every minute. A trainer that is silent for
`SILENT_S` loads a large model, or hangs: before its first batch, between two, or in a step. The watchdog reports it
then. It kills the trainer after a lease's time, and the supervisor starts the next one. A model may need longer to load
than that, so the next trainer gets twice the time.

A trainer that another program runs (slime's driver) is reported in the same way, and ended by its own program.
"""

import asyncio
import contextlib
import math
import time
from typing import Protocol

import structlog

from openclaw_rl.errors import LedgerUnavailable
from openclaw_rl.processes.supervisor import Child, ChildStatus
from openclaw_rl.server.api.trainer import TRAINER
from openclaw_rl.telemetry.alerts import Alert
from openclaw_rl.telemetry.health import Health

log = structlog.get_logger()

LONGEST_WATCH_S = 30.0
SILENT_S = 300.0
PROCESS = "trainer's process"
"""Name of the part in `Health` that is out of order while the process is silent."""


class LeaseBook(Protocol):
    """Methods of the ledger that the watchdog uses."""

    async def overdue(self) -> str | None: ...

    async def revoke(self, *, trainer: str | None = None, reason: str) -> bool: ...


class Process(Protocol):
    """Members of a `Child` that the heartbeat monitor uses."""

    @property
    def up_s(self) -> float: ...

    def status(self) -> ChildStatus: ...

    def kill_hung(self) -> None: ...


class TrainerHeartbeat:
    """Time of the last call with the trainer's token. The trainer's routes set it."""

    def __init__(self) -> None:
        self._at = -math.inf

    def heard(self) -> None:
        self._at = time.monotonic()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._at


async def end_when_hung(
    trainer: Child, ledger: LeaseBook, health: Health, heartbeat: TrainerHeartbeat, *, lease_s: float
) -> None:
    """Watch a local trainer until cancelled."""
    silence = HeartbeatMonitor(trainer, health, heartbeat, patience_s=max(lease_s, SILENT_S))
    while True:
        await asyncio.sleep(min(lease_s / 2, LONGEST_WATCH_S))
        with contextlib.suppress(LedgerUnavailable):
            await _end_overdue(trainer, ledger, health, lease_s=lease_s)
        silence.look()


async def _end_overdue(trainer: Child, ledger: LeaseBook, health: Health, *, lease_s: float) -> None:
    """Take the lease from a local trainer that let it run out, and kill the trainer if the lease was its own."""
    name = await ledger.overdue()
    if name is None or not name.startswith("local@"):
        return
    # A process younger than the lease cannot have taken it: a process that died did, and the batch waits again.
    hangs = trainer.up_s > lease_s
    await ledger.revoke(trainer=name, reason="it let its lease run out" if hangs else "its process ended")
    if hangs:
        log.error("trainer_hangs", trainer=name, reason="it let its lease run out without a word")
        trainer.kill_hung()
        health.failed(TRAINER, "it let its lease run out, was ended and started again", at_once=True)


class HeartbeatMonitor:
    """Monitor of a process's heartbeat: `look` reports silence, and kills the process when the patience is over."""

    def __init__(self, trainer: Process, health: Health, heartbeat: TrainerHeartbeat, *, patience_s: float) -> None:
        self._trainer, self._health, self._heartbeat = trainer, health, heartbeat
        self._first_patience_s = self._patience_s = patience_s
        self._reported: int | None = None
        """Process id whose silence `Health` already knows."""

    def look(self) -> None:
        pid, up_s, age_s = self._trainer.status().pid, self._trainer.up_s, self._heartbeat.age_s
        if pid is None:  # the supervisor reports that, and starts the process
            return
        if age_s < min(up_s, SILENT_S):
            self._patience_s = self._first_patience_s
            self._health.ok(PROCESS)
        silent_s = min(age_s, up_s)
        if silent_s >= SILENT_S and pid != self._reported:
            self._reported = pid
            self._health.failed(PROCESS, f"not a word for {silent_s:.0f} s: it loads its model, or hangs", at_once=True)
        if silent_s >= self._patience_s:
            log.error("trainer_hangs", reason="it said nothing", silent_s=round(silent_s), pid=pid)
            self._trainer.kill_hung()
            self._patience_s *= 2
            self._health.failed(PROCESS, f"not a word for {silent_s:.0f} s: it was ended and started again")


class SilenceMonitor:
    """Monitor of a trainer that another program runs: `look` reports its silence, and ends no process."""

    def __init__(self, health: Health, heartbeat: TrainerHeartbeat, alert: Alert) -> None:
        self._health, self._heartbeat, self._alert = health, heartbeat, alert
        self._since = time.monotonic()

    def look(self) -> None:
        silent_s = min(self._heartbeat.age_s, time.monotonic() - self._since)
        if silent_s < SILENT_S:
            self._health.ok(PROCESS)
        elif not self._health.is_failing(PROCESS):
            self._health.failed(PROCESS, f"not a word for {silent_s:.0f} s: it starts, hangs, or is gone", at_once=True)
            self._alert("trainer_silent", silent_s=round(silent_s))


async def report_silence(health: Health, heartbeat: TrainerHeartbeat, alert: Alert) -> None:
    """Watch the trainer of another program until cancelled."""
    monitor = SilenceMonitor(health, heartbeat, alert)
    while True:
        await asyncio.sleep(LONGEST_WATCH_S)
        monitor.look()

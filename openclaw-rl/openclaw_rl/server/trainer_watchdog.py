"""Ends a local trainer that hangs, and says so: by what the ledger says of its lease, until it commits again; without
one, by its silence, until it speaks again.

A trainer that is well asks for a batch every few seconds, and renews a lease every minute. One that says nothing for
`SILENT_S` loads a large model, or hangs before its first batch, between two, or in a step: that is told. After a
lease's time it is ended and started again; since a model may need longer to load than that, the next one gets twice
the time.
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
from openclaw_rl.telemetry.health import Health

log = structlog.get_logger()

LONGEST_WATCH_S = 30.0
SILENT_S = 300.0
PROCESS = "trainer's process"
"""The part that is out of order while it says nothing, to the meters."""


class LeaseBook(Protocol):
    """The part of the ledger that watches over a trainer."""

    async def overdue(self) -> str | None: ...

    async def revoke(self, *, trainer: str | None = None, reason: str) -> bool: ...


class Process(Protocol):
    """The part of a `Child` that silence is about."""

    @property
    def up_s(self) -> float: ...

    def status(self) -> ChildStatus: ...

    def kill_hung(self) -> None: ...


class TrainerHeartbeat:
    """When a trainer last said anything to this server: its routes tell."""

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
    """Watch over a local trainer until cancelled."""
    silence = HeartbeatMonitor(trainer, health, heartbeat, patience_s=max(lease_s, SILENT_S))
    while True:
        await asyncio.sleep(min(lease_s / 2, LONGEST_WATCH_S))
        with contextlib.suppress(LedgerUnavailable):
            await _end_overdue(trainer, ledger, health, lease_s=lease_s)
        silence.look()


async def _end_overdue(trainer: Child, ledger: LeaseBook, health: Health, *, lease_s: float) -> None:
    """A local trainer that lets its lease run out is stopped or starved: it would hold its batch for ever. One that was
    started less than a lease ago never had this one: it is the batch of a process that died, and waits again."""
    name = await ledger.overdue()
    if name is None or not name.startswith("local@"):
        return
    hangs = trainer.up_s > lease_s
    await ledger.revoke(trainer=name, reason="it let its lease run out" if hangs else "its process ended")
    if hangs:
        log.error("trainer_hangs", trainer=name, reason="it let its lease run out without a word")
        trainer.kill_hung()
        health.failed(TRAINER, "it let its lease run out, was ended and started again", at_once=True)


class HeartbeatMonitor:
    """`look` now and then: it tells of a process that says nothing, and ends it when its patience is over."""

    def __init__(self, trainer: Process, health: Health, heartbeat: TrainerHeartbeat, *, patience_s: float) -> None:
        self._trainer, self._health, self._heartbeat = trainer, health, heartbeat
        self._first_patience_s = self._patience_s = patience_s
        self._told_of: int | None = None
        """The process that the meters know to be silent."""

    def look(self) -> None:
        pid, up_s, age_s = self._trainer.status().pid, self._trainer.up_s, self._heartbeat.age_s
        if pid is None:  # the supervisor's to say, and to start
            return
        if age_s < min(up_s, SILENT_S):
            self._patience_s = self._first_patience_s
            self._health.ok(PROCESS)
        silent_s = min(age_s, up_s)
        if silent_s >= SILENT_S and pid != self._told_of:
            self._told_of = pid
            self._health.failed(PROCESS, f"not a word for {silent_s:.0f} s: it loads its model, or hangs", at_once=True)
        if silent_s >= self._patience_s:
            log.error("trainer_hangs", reason="it said nothing", silent_s=round(silent_s), pid=pid)
            self._trainer.kill_hung()
            self._patience_s *= 2
            self._health.failed(PROCESS, f"not a word for {silent_s:.0f} s: it was ended and started again")

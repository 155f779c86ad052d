"""Ends a local trainer that hangs, by what the ledger says of its lease, and says so until it commits again."""

import asyncio
import contextlib
from typing import Protocol

import structlog

from openclaw_rl.errors import LedgerUnavailable
from openclaw_rl.meters import Meters
from openclaw_rl.supervisor import Child
from openclaw_rl.trainers.routes import TRAINER

events = structlog.get_logger()

LONGEST_WATCH_S = 30.0


class LeaseBook(Protocol):
    """The part of the ledger that watches over a trainer."""

    async def overdue(self) -> str | None: ...

    async def revoke(self, *, trainer: str | None = None, reason: str) -> bool: ...


async def end_when_hung(trainer: Child, ledger: LeaseBook, meters: Meters, *, lease_s: float) -> None:
    """A local trainer that lets its lease run out is stopped or starved: it would hold its batch for ever. One that was
    started less than a lease ago never had this one: it is the batch of a process that died, and waits again."""
    while True:
        await asyncio.sleep(min(lease_s / 2, LONGEST_WATCH_S))
        with contextlib.suppress(LedgerUnavailable):
            name = await ledger.overdue()
            if name is None or not name.startswith("local@"):
                continue
            hangs = trainer.up_s > lease_s
            await ledger.revoke(trainer=name, reason="it let its lease run out" if hangs else "its process ended")
            if hangs:
                events.error("trainer_hangs", trainer=name, reason="it let its lease run out without a word")
                trainer.kill_hung()
                meters.failed(TRAINER, "it let its lease run out, was ended and started again", at_once=True)

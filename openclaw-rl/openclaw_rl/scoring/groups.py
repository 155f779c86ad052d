"""The worker of groups: expires what got no outcome in time, and has the method give credit to closed groups.

The ledger is the queue, as for the other stages. A kill between the method and the ledger's one transaction loses
nothing: the group is read and counted again. A fault of a method costs its group, not the server.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from openclaw_rl.errors import LedgerError
from openclaw_rl.methods.base import GroupMethod, Method
from openclaw_rl.settings import MethodSettings
from openclaw_rl.types import ClosedGroup, DropReason, StepCredit

log = structlog.get_logger()

_POLL_S = 1.0
"""Time between two looks at the ledger when no event wakes the loop."""


class GroupLedger(Protocol):
    """The part of the ledger that this worker uses."""

    async def expire_episodes(self) -> int: ...

    async def groups_to_credit(self) -> list[ClosedGroup]: ...

    async def record_credit(self, group: ClosedGroup, credits: Sequence[StepCredit]) -> bool: ...


async def credit_groups(
    ledger: GroupLedger,
    method: Method,
    settings: MethodSettings,
    wake: asyncio.Event,
    *,
    sampled: asyncio.Event | None = None,
    poll_s: float = _POLL_S,
) -> None:
    """Give credit to the steps of closed groups, until cancelled.

    wake: set by others when an episode ended or a turn was judged. sampled: set here, for the trainer that waits.
    """
    while True:
        wake.clear()
        try:
            if expired := await ledger.expire_episodes():
                log.warning("episodes_expired", episodes=expired)
            for group in await ledger.groups_to_credit():
                made = _credit(method, settings, group)
                if not await ledger.record_credit(group, made):
                    continue  # it changed meanwhile, and comes again
                dropped = sum(credit.drop is not None for credit in made)
                log.info("group_credited", group=group.number, samples=len(made) - dropped, dropped=dropped)
                if sampled is not None:
                    sampled.set()
        except LedgerError as error:
            log.error("groups_ledger_unavailable", error=str(error))
        try:
            async with asyncio.timeout(poll_s):
                await wake.wait()
        except TimeoutError:
            pass


def _credit(method: Method, settings: MethodSettings, group: ClosedGroup) -> Sequence[StepCredit]:
    """Return the method's credit; every step is dropped where the method gives none."""
    if settings.credits_groups:
        credits: GroupMethod = method  # type: ignore[assignment]
        try:
            return credits.credit(group, settings)
        except Exception:  # a fault that no code foresaw costs this group, and no chat
            log.exception("credit_fault", group=group.number)
    detail = f"{method.name} gave no credit to its group"
    return [
        StepCredit(step.turn_id, episode.outcome, None, DropReason.METHOD, detail)
        for episode in group.trajectories
        for step in episode.steps
        if step.is_waiting
    ]

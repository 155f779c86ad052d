"""The worker of groups: closed groups get their credit once, whatever fails on the way."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from openclaw_rl.errors import LedgerUnavailable
from openclaw_rl.methods.agent import METHOD, AgentSettings
from openclaw_rl.methods.binary_rl import METHOD as BINARY
from openclaw_rl.scoring.groups import credit_groups
from openclaw_rl.settings import MethodSettings
from openclaw_rl.types import ClosedGroup, DropReason, GroupStep, Trajectory


def a_group(number):
    episodes = (Trajectory(float(o), (GroupStep(f"{number}.{o}", None, is_waiting=True),)) for o in (1, -1))
    return ClosedGroup(number, 2, tuple(episodes))


class Groups:
    """Closed groups in memory, and what was recorded for each."""

    def __init__(self, *groups, fails=0, changes=0):
        self.waiting = {group.number: group for group in groups}
        self.fails, self.changes, self.recorded, self.expired = fails, changes, {}, 0

    async def expire_episodes(self):
        self.expired += 1
        return 0

    async def groups_to_credit(self):
        return list(self.waiting.values())

    async def record_credit(self, group, credits):
        if self.fails:
            self.fails -= 1
            raise LedgerUnavailable("disk full")
        if self.changes:
            self.changes -= 1
            return False
        del self.waiting[group.number]
        self.recorded[group.number] = [credit.drop or credit.advantage for credit in credits]
        return True


@asynccontextmanager
async def crediting(ledger, method=METHOD, settings=None, **more):
    settings = settings or AgentSettings(name="agent")
    task = asyncio.create_task(credit_groups(ledger, method, settings, asyncio.Event(), poll_s=0.001, **more))
    yield
    async with asyncio.timeout(60):
        while ledger.waiting and not task.done():
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("fails", "changes"), [(0, 0), (3, 0), (0, 2)])
async def test_every_closed_group_gets_its_credit_once(fails, changes):
    ledger, sampled = Groups(a_group(1), a_group(2), fails=fails, changes=changes), asyncio.Event()
    async with crediting(ledger, sampled=sampled):
        pass
    assert ledger.recorded == {1: [1.0, -1.0], 2: [1.0, -1.0]}
    assert sampled.is_set()
    assert ledger.expired


async def test_a_method_without_the_hook_drops_the_steps():
    ledger = Groups(a_group(1))
    async with crediting(ledger, BINARY, MethodSettings()):
        pass
    assert ledger.recorded == {1: [DropReason.METHOD] * 2}


async def test_a_fault_of_the_method_costs_its_group():
    class Broken:
        name = "broken"

        def credit(self, group, settings):
            if group.number == 1:
                raise ZeroDivisionError
            return METHOD.credit(group, settings)

    ledger = Groups(a_group(1), a_group(2))
    async with crediting(ledger, Broken()):
        pass
    assert ledger.recorded == {1: [DropReason.METHOD] * 2, 2: [1.0, -1.0]}

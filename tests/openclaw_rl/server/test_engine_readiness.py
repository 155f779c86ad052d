"""Engine readiness: chats are held while the engine is down, and admitted when it serves; its version is restored
after any absence.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from waiting import until

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.errors import EngineGone
from openclaw_rl.server.engine_readiness import DOWN_AFTER, EngineReadiness
from openclaw_rl.testing import FakeEngine


class Watched:
    """An engine whose polls are counted, and a restore that can fail."""

    def __init__(self) -> None:
        self.engine, self.serving = FakeEngine(), VersionAdmission(120.0)
        self.serving.switch(0, None)
        self.restored, self.failures = 0, 0
        self.in_place = True
        self.exited = asyncio.Event()
        self.readiness = EngineReadiness(
            self.engine, self.serving, self.restore, is_in_place=self.is_in_place, exited=self.exited, poll_s=0.001
        )

    async def is_in_place(self) -> bool:
        return self.in_place

    async def restore(self) -> None:
        if self.failures:
            self.failures -= 1
            raise EngineGone("it broke off")
        self.restored, self.in_place = self.restored + 1, True


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    watched = Watched()
    task = asyncio.create_task(watched.readiness.run())
    yield watched
    assert not task.done(), task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_that_is_down_shuts_the_gate_and_one_that_is_back_opens_it(watched: Watched) -> None:
    watched.engine.go_down()
    await until(lambda: not watched.serving.is_open)
    assert watched.restored == 0
    watched.engine.come_up()
    await until(lambda: watched.serving.is_open)
    assert watched.restored == 1


async def test_a_restore_that_fails_is_tried_again_behind_a_shut_gate(watched: Watched) -> None:
    watched.failures = 3
    watched.serving.hold()
    watched.exited.set()
    await until(lambda: watched.restored == 1)
    await until(lambda: watched.serving.is_open)
    assert watched.failures == 0


async def test_one_missed_poll_restores_though_the_gate_never_shut() -> None:
    """Another program restarted its engine between two polls: the adapters are gone."""
    watched = Watched()
    polls = iter([True, False, True, True])
    done = asyncio.Event()

    async def is_healthy() -> bool:
        healthy = next(polls, None)
        if healthy is None:
            done.set()
        return healthy is not False

    watched.engine.is_healthy = is_healthy  # type: ignore[method-assign]
    assert DOWN_AFTER > 1
    task = asyncio.create_task(watched.readiness.run())
    async with asyncio.timeout(120):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert watched.restored == 1
    assert watched.serving.is_open


async def test_an_engine_that_came_back_empty_between_two_polls_is_restored(watched: Watched) -> None:
    watched.in_place = False
    await until(lambda: watched.restored == 1)
    await until(lambda: watched.serving.is_open)

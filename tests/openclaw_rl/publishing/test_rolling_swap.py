"""Full weights roll through a pool of engines, each a stub over real HTTP whose log-probs tell its weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from engine_client import served
from versioned_chat import versioned_chat
from waiting import until

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.errors import EngineGone, EngineRefused
from openclaw_rl.proxy.generation import Sampled
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.full_swap import FullWeightSwap
from openclaw_rl.publishing.rolling_swap import RollingSwap
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.testing import FakeEngine
from openclaw_rl.testing.fake_engine import Pacing
from openclaw_rl.types import Version, VersionState, WeightKind

FOLDER = Path("weights")
SLOW, FAST = 5.0, 2000.0
"""Tokens a second: while what is shown happens in the middle of replies, and after it."""


class SlowToTake(FakeEngine):
    """An engine that reads weights until it is let go, refuses them, or dies of them."""

    def __init__(self) -> None:
        super().__init__(pacing=Pacing(tokens_per_s=SLOW))
        self.reads, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.refuses = self.dies = False

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        self.reads.set()
        await self.may_end.wait()
        if self.refuses:
            raise EngineRefused("no such folder", status=400)
        if self.dies:
            self.go_down()
        self._check_up()
        await super().update_weights(folder, weight_version)


class World:
    def __init__(self, engines: list[SlowToTake], pool: PooledEngine) -> None:
        self.engines, self.pool, self.serving = engines, pool, VersionAdmission(hold_s=120)
        self.serving.switch(0, None)
        settings = PublisherSettings(unbroken_drain_s=0.0)
        as_one = FullWeightSwap(pool, self.serving, drain_s=0.0, call_timeout_s=120, push_timeout_s=120)
        self.swapper = RollingSwap(pool, as_one, self.serving, settings)

    async def chat(self, number: int, tokens: int = 60) -> Sampled:
        return await versioned_chat(self.pool, self.serving, self.engines[0].policy, number, tokens)

    @property
    def held(self) -> list[int]:
        return [engine.weight_version for engine in self.engines]


@asynccontextmanager
async def world_of(count: int) -> AsyncIterator[World]:
    engines = [SlowToTake() for _ in range(count)]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(engine)) for engine in engines]
        pool = PooledEngine(clients, change_s=60, is_full=True, poll_s=0.01)
        assert await pool.fault() is None
        watch = asyncio.create_task(pool.run())
        try:
            yield World(engines, pool)
            assert not watch.done(), watch
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


@asynccontextmanager
async def chats(world: World, n: int) -> AsyncIterator[list[asyncio.Task[Sampled]]]:
    """`n` chats in the middle of their replies, where they stay for seconds; behind the block they end soon."""
    tasks = [asyncio.create_task(world.chat(k)) for k in range(n)]
    await until(lambda: sum(engine.running for engine in world.engines) == n)
    yield tasks
    for engine in world.engines:
        engine.pacing.tokens_per_s = FAST


async def test_chats_go_on_while_each_engine_in_turn_takes_the_weights() -> None:
    async with world_of(2) as world:
        one, two = world.engines
        for engine in world.engines:
            engine.may_end.clear()
        async with chats(world, 6) as tasks:
            swap = asyncio.create_task(world.swapper.swap(1, FOLDER))
            await until(one.reads.is_set)
            assert world.serving.is_open
            assert (await world.chat(7, tokens=3)).runs == [[0, 3]], "the old version, on the other engine"
            await until(lambda: two.running == 6)  # also those that were cut
            one.may_end.set()
            await until(two.reads.is_set)
            assert world.serving.is_open
            assert (await world.chat(8, tokens=3)).runs == [[1, 3]], "the new version, while the other one takes it"
            await until(lambda: one.running == 6)
            two.may_end.set()
            times = await swap
        assert (world.held, times.held_s) == ([1, 1], 0.0)
        for sampled in await asyncio.gather(*tasks):
            assert [version for version, _ in sampled.runs] == [0, 1]
        assert all(status.is_in and status.sessions == 0 for status in world.pool.statuses())


async def test_an_engine_that_dies_of_its_turn_leaves_and_comes_back_with_what_serves() -> None:
    async with world_of(3) as world:
        two = world.engines[1]
        two.dies = True
        async with chats(world, 6) as tasks:
            await world.swapper.swap(1, FOLDER)
        await asyncio.gather(*tasks)
        assert (world.serving.current, world.held) == (1, [1, 0, 1])
        assert [status.is_in for status in world.pool.statuses()] == [True, False, True]
        two.dies = False
        two.come_up()
        await until(lambda: all(status.is_in for status in world.pool.statuses()))
        assert world.held == [1, 1, 1]


async def test_an_engine_that_refuses_them_first_leaves_the_old_version_serving() -> None:
    async with world_of(2) as world:
        world.engines[0].refuses = True
        async with chats(world, 4) as tasks:
            with pytest.raises(EngineRefused):
                await world.swapper.swap(1, FOLDER)
        assert {tuple(map(tuple, sampled.runs)) for sampled in await asyncio.gather(*tasks)} == {((0, 60),)}
        assert (world.serving.current, world.held) == (0, [0, 0])
        assert (await world.chat(9, tokens=3)).runs == [[0, 3]]


@pytest.mark.parametrize(("count", "dead"), [(2, 1), (4, 2), (5, 2), (5, 3)])
async def test_engines_that_die_in_their_turn_before_any_took_the_weights_leave_the_rest_to_go_on(
    count: int, dead: int
) -> None:
    async with world_of(count) as world:
        for engine in world.engines[:dead]:
            engine.dies = True
        async with chats(world, 6) as tasks:
            times = await world.swapper.swap(1, FOLDER)
        for sampled in await asyncio.gather(*tasks):
            assert [version for version, _ in sampled.runs] == [0, 1]
        assert (world.serving.current, world.held) == (1, [0] * dead + [1] * (count - dead))
        assert (times.held_s > 0) == (count - dead == 1), "one engine alone swaps with chats held"
        for engine in world.engines:
            engine.dies = False
            engine.come_up()
        await until(lambda: all(status.is_in for status in world.pool.statuses()))
        assert world.held == [1] * count


async def test_no_engine_lives_to_take_the_weights() -> None:
    async with world_of(2) as world:
        for engine in world.engines:
            engine.dies = True
        with pytest.raises(EngineGone):
            await world.swapper.swap(1, FOLDER)
        assert (world.serving.current, world.serving.is_open) == (0, False)


async def test_an_engine_that_refuses_them_behind_the_switch_is_out_of_the_pool() -> None:
    async with world_of(2) as world:
        two = world.engines[1]
        two.refuses = True
        async with chats(world, 4) as tasks:
            await world.swapper.swap(1, FOLDER)
        await asyncio.gather(*tasks)
        assert (world.serving.current, world.held) == (1, [1, 0])
        for n in range(10, 14):
            assert (await world.chat(n, tokens=3)).runs == [[1, 3]]
        assert [status.is_in for status in world.pool.statuses()] == [True, False]
        two.refuses = False
        await until(lambda: world.held == [1, 1] and world.pool.statuses()[1].is_in)


async def test_a_pool_of_one_engine_swaps_as_one_engine_does() -> None:
    async with world_of(1) as world:
        async with chats(world, 3) as tasks:
            times = await world.swapper.swap(1, FOLDER)
        for sampled in await asyncio.gather(*tasks):
            assert [version for version, _ in sampled.runs] == [0, 1]
        assert times.held_s > 0
        assert world.held == [1]


def version_of(number: int) -> Version:
    state = VersionState.SERVING if number == 0 else VersionState.LOADING
    folder = f"versions/v{number}" if number else None
    return Version(number, None, WeightKind.FULL, "base", folder, None, state)


async def test_an_engine_whose_push_got_no_answer_is_given_what_serves_whatever_it_names() -> None:
    """It still names the old version when it is asked, and the push lands later."""
    async with world_of(2) as world:
        one, two = world.engines
        two.refuses = True
        world.pool.hold_start(FOLDER)
        pushed: list[int] = []
        update = one.update_weights

        async def unanswered(folder: Path, weight_version: int) -> None:
            pushed.append(weight_version)
            if len(pushed) == 1:
                raise EngineGone("the answer was lost")
            await update(folder, weight_version)

        one.update_weights = unanswered  # type: ignore[method-assign]
        with pytest.raises(EngineRefused):
            await world.swapper.swap(1, FOLDER)
        assert world.serving.current == 0
        two.refuses = False
        await until(lambda: all(status.is_in for status in world.pool.statuses()))
        assert pushed == [1, 0]
        await world.swapper.swap(2, FOLDER)
        assert world.held == [2, 2]


async def test_the_first_roll_from_the_weights_of_the_start_leaves_the_old_version_in_place() -> None:
    async with world_of(4) as world:
        pool, settings = world.pool, PublisherSettings(unbroken_drain_s=0.0)
        policy = PolicyEngine(pool, world.serving, settings, FOLDER, base_folder=FOLDER / "base")

        async def find(number: int) -> Version:
            return version_of(number)

        await policy.restore(version_of(0), find)
        one, two = world.engines[:2]
        two.may_end.clear()
        two.refuses = True
        swap = asyncio.create_task(policy.serve(version_of(1)))
        await until(two.reads.is_set)
        assert world.held == [1, 0, 0, 0]
        assert await policy.is_in_place()
        two.may_end.set()
        with pytest.raises(EngineRefused):
            await swap
        await until(lambda: one.weight_version == 0 and all(status.is_in for status in pool.statuses()))
        assert (world.serving.current, world.held) == (0, [0, 0, 0, 0])
        assert await policy.is_in_place()

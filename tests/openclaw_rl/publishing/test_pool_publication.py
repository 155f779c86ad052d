"""A version on a pool of engines, each a stub over real HTTP: it serves once every engine has passed the self-test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from engine_client import served
from publishing import World, until

from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.errors import EngineGone
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.settings import PublisherSettings, TrainingSettings
from openclaw_rl.testing import FakeEngine, ToyPolicy
from openclaw_rl.types import VersionState, WeightKind


@asynccontextmanager
async def pooled_world(folder: Path, other: FakeEngine) -> AsyncIterator[tuple[World, PooledEngine]]:
    """Yield a world whose publisher has a pool: the world's engine, and another one."""
    identity = Identity("base", "tokenizer", "tiny", WeightKind.LORA)
    ledger = await Ledger.open(folder / "ledger.sqlite3", identity=identity, training=TrainingSettings(min_batch=1))
    world = World(ledger, FakeEngine(), folder, settings := PublisherSettings(max_step_kl=1e9, max_base_kl=1e9))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(ledger.aclose)
        engines = [await stack.enter_async_context(served(engine)) for engine in (world.engine, other)]
        pool = PooledEngine(engines, change_s=60, poll_s=0.01)
        assert await pool.fault() is None
        world.publisher = Publisher(ledger, PolicyEngine(pool, world.serving, settings, folder), settings)
        await world.publisher.restore()
        tasks = [asyncio.create_task(work) for work in (pool.run(), world.publisher.run())]
        try:
            yield world, pool
            assert not any(task.done() for task in tasks), tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("is_same", [True, False])
async def test_a_version_serves_once_each_engine_has_passed_its_self_test(tmp_path: Path, is_same: bool) -> None:
    other = FakeEngine() if is_same else FakeEngine(policy=ToyPolicy(spread=4.0))
    async with pooled_world(tmp_path, other) as (world, pool):
        number = await world.commit(sampled_by=0)
        world.publisher.wake()
        wanted = VersionState.SERVING if is_same else VersionState.REJECTED

        async def is_decided() -> bool:
            return await world.state(number) is wanted

        await until(is_decided)
        assert world.serving.current == (number if is_same else 0)
        if not is_same:
            reason = (await world.ledger.version(number)).reason or ""
            assert "engine and trainer differ" in reason
        names = {f"policy-v{number}"} if is_same else set()
        assert (set(world.engine.adapters), set(other.adapters)) == (names, names)
        assert set(await pool.adapter_folders()) == names


async def test_a_version_serves_though_an_engine_died_and_that_one_gets_it_when_it_is_back(tmp_path: Path) -> None:
    other = FakeEngine()
    async with pooled_world(tmp_path, other) as (world, pool):
        other.go_down()
        number = await world.commit(sampled_by=0)
        world.publisher.wake()

        async def serves() -> bool:
            return await world.state(number) is VersionState.SERVING

        await until(serves)
        other.come_up()

        async def is_in() -> bool:
            return all(status.is_in for status in pool.statuses())

        await until(is_in)
        assert set(other.adapters) == {f"policy-v{number}"}


async def test_an_engine_that_fails_its_self_test_leaves_and_the_version_serves_on_the_others(tmp_path: Path) -> None:
    other = FakeEngine()
    async with pooled_world(tmp_path, other) as (world, pool):

        async def fails(_: object) -> object:
            raise EngineGone("it cannot score")

        other.generate = fails  # type: ignore[assignment,method-assign]
        number = await world.commit(sampled_by=0)
        world.publisher.wake()

        async def serves() -> bool:
            return await world.state(number) is VersionState.SERVING

        await until(serves)
        assert pool.statuses()[1].failures

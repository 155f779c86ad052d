"""An operator's drain: what runs ends there, nothing new goes there, and it comes back with what the others hold."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest
from engine_client import request, served
from waiting import until

from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.engines.pool_drains import EngineDrains
from openclaw_rl.errors import EngineLeft, RequestError
from openclaw_rl.testing import FakeEngine, Scripted

LONG = Scripted(ids=(5, 6, 2), hold_after=1)


@asynccontextmanager
async def drained_pool(
    fakes: Sequence[FakeEngine], file: Path, *, is_full: bool = False, wait_s: float = 60, poll_s: float = 0.01
) -> AsyncIterator[tuple[PooledEngine, EngineDrains]]:
    """Yield a pool that watches its engines, and the operator's hand on it."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(served(fake)) for fake in fakes]
        pool = PooledEngine(engines, change_s=60, is_full=is_full, poll_s=poll_s)
        for number, member in enumerate(pool.every, 1):
            member.own_name = f"engine {number}"  # the ports of these engines are new each time
        drains = EngineDrains(pool, file, wait_s=wait_s)
        await pool.fault()
        watch = asyncio.create_task(pool.run())
        try:
            yield pool, drains
            assert not watch.done(), watch
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


async def ask(pool: PooledEngine, **fields: object) -> list[int]:
    async with aclosing(pool.stream(request([1], **fields))) as events:
        return [token async for event in events for token in event.output_ids]


async def test_what_runs_ends_there_and_its_conversations_go_on_elsewhere(tmp_path: Path) -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with drained_pool(fakes, tmp_path / "drained.json") as (pool, drains):
        for fake in fakes:
            fake.script(LONG)
        async with aclosing(pool.stream(request([1], affinity="a"))) as events:
            await anext(events)
            number = 1 if one.running else 2
            busy, other = (one, two) if one.running else (two, one)
            other._scripts.clear()
            told = await drains.set(number, True)
            assert (told.is_drained, told.is_in, told.running, told.fault) == (True, False, 1, None)
            for name in ("a", "b", "c", None):
                await ask(pool, affinity=name, n=2)
            assert (len(busy.calls), len(other.calls)) == (1, 4)
            busy.release()
            assert [token async for event in events for token in event.output_ids] == [6, 2], "it ended there"
        assert pool.statuses()[number - 1].running == 0
        assert pool.ready() == [pool.every[2 - number].engine]


async def test_it_comes_back_when_told_to_with_what_the_others_hold(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    one, two = fakes = FakeEngine(), FakeEngine()
    async with drained_pool(fakes, tmp_path / "drained.json") as (pool, drains):
        await pool.load_adapter("policy-v1", tmp_path)
        await drains.set(1, True)
        await pool.load_adapter("policy-v2", tmp_path)
        await pool.unload_adapter("policy-v1")
        one.go_down()
        await until(lambda: pool.every[0].missed)
        assert pool.statuses()[0].fault is None, "the operator works on it"
        one.come_up()
        for _ in range(3):
            await ask(pool, lora_path="policy-v2", n=2)
        assert not one.calls
        assert not (await drains.set(1, False)).is_drained
        await until(lambda: pool.statuses()[0].is_in)
        assert set(one.adapters) == set(two.adapters) == {"policy-v2"}
        for _ in range(2):
            await ask(pool, lora_path="policy-v2", n=2)
        assert one.calls


async def test_the_last_engine_that_serves_is_not_drained_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    _, two = fakes = FakeEngine(), FakeEngine()
    async with drained_pool(fakes, tmp_path / "drained.json") as (pool, drains):
        await drains.set(1, True)
        await drains.set(1, True)
        with pytest.raises(RequestError, match="engine 2 is the last one that serves") as refused:
            await drains.set(2, True)
        assert (refused.value.status, refused.value.code) == (409, "last_engine")
        assert await ask(pool, n=2)
        await drains.set(1, False)
        await until(lambda: pool.statuses()[0].is_in)
        two.go_down()
        await until(lambda: not pool.statuses()[1].is_in)
        with pytest.raises(RequestError, match="engine 1 is the last one"):
            await drains.set(1, True)
        assert (await drains.set(2, True)).is_drained, "one that is gone may be drained"
        for number in (0, 3, -1):
            with pytest.raises(RequestError, match=f"no engine {number}: this server has 1 to 2") as refused:
                await drains.set(number, True)
            assert refused.value.status == 404


async def test_a_restart_keeps_what_is_drained_as_long_as_one_engine_is_left(tmp_path: Path) -> None:
    file, fakes = tmp_path / "drained.json", (FakeEngine(), FakeEngine())
    async with drained_pool(fakes, file) as (_, drains):
        await drains.set(2, True)
    async with drained_pool(fakes, file) as (pool, drains):
        assert [(one.is_in, one.is_drained) for one in pool.statuses()] == [(True, False), (False, True)]
        await drains.set(2, False)
        await until(lambda: pool.statuses()[1].is_in)
    async with drained_pool(fakes, file) as (pool, _):
        assert not any(one.is_drained for one in pool.statuses())
    file.write_text('["http://elsewhere"]')
    async with drained_pool(fakes, file) as (_, drains):
        await drains.set(1, True)
    assert json.loads(file.read_text()) == ["http://elsewhere", "engine 1"], "out of the settings for a while"
    for content in ('["engine 1", "engine 2"]', "no list", "{}", '[1, "engine 9"]'):
        file.write_text(content)
        async with drained_pool(fakes, file) as (pool, _):
            assert [one.is_in for one in pool.statuses()] == [True, True], content


async def test_a_drain_waits_for_a_swap_and_is_refused_after_a_while(tmp_path: Path) -> None:
    async with drained_pool((FakeEngine(), FakeEngine()), tmp_path / "drained.json", wait_s=0.05) as (pool, drains):
        async with pool.rolling():
            with pytest.raises(RequestError, match="takes new weights now") as refused:
                await drains.set(1, True)
        assert (refused.value.status, refused.value.code) == (409, "engine_busy")
        assert not pool.statuses()[0].is_drained


async def test_full_weights_that_came_meanwhile_are_pushed_before_it_serves(tmp_path: Path) -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with drained_pool(fakes, tmp_path / "drained.json", is_full=True) as (pool, drains):
        await drains.set(1, True)
        await pool.update_weights(tmp_path, 3)
        assert (one.weight_version, two.weight_version) == (0, 3)
        await drains.set(1, False)
        await until(lambda: pool.statuses()[0].is_in)
        assert one.weight_version == two.weight_version == 3


async def test_a_swap_of_all_ends_the_replies_of_a_drained_engine_too(tmp_path: Path) -> None:
    """They hold the old version: a swap as one would wait for them until its deadline."""
    one, two = fakes = FakeEngine(), FakeEngine()
    async with drained_pool(fakes, tmp_path / "drained.json", is_full=True) as (pool, drains):
        for fake in fakes:
            fake.script(LONG)
        async with aclosing(pool.stream(request([1], affinity="a"))) as events:
            await anext(events)
            await drains.set(1 if one.running else 2, True)
            await pool.abort_all()
            with pytest.raises(EngineLeft):
                async for _ in events:
                    pass
        assert not one.running
        assert not two.running

"""A pool of engines: each a stub over real HTTP, that the pool's own watch leaves and joins."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest
from engine_client import request, served
from waiting import until

from openclaw_rl.engines.dialect import ModelInfo
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.errors import EngineFaulty, EngineGone, EngineLeft, EngineRefused
from openclaw_rl.testing import FakeEngine, Scripted

LONG = Scripted(ids=(5, 6, 2), hold_after=1)


@asynccontextmanager
async def pool_of(
    fakes: Sequence[FakeEngine], *, poll_s: float = 0.01, change_s: float = 60
) -> AsyncIterator[PooledEngine]:
    """Yield a pool that watches its engines; all that are up are in it."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(served(fake)) for fake in fakes]
        pool = PooledEngine(engines, change_s=change_s, poll_s=poll_s)
        await pool.fault()
        watch = asyncio.create_task(pool.run())
        try:
            yield pool
            assert not watch.done(), watch
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


async def ask(pool: PooledEngine, **fields: object) -> list[int]:
    async with aclosing(pool.stream(request([1], **fields))) as events:
        return [token async for event in events for token in event.output_ids]


async def test_a_conversation_stays_and_new_ones_go_where_less_runs() -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        for name in ("a", "b", "a", "b", "a"):
            await ask(pool, affinity=name, n=2)
        assert sorted((len(one.calls), len(two.calls))) == [2, 3]
        assert not any(call.affinity for fake in fakes for call in fake.calls), "it is not sent"
        for fake in fakes:
            fake.script(LONG)
        async with aclosing(pool.stream(request([1], affinity="a"))) as events:
            await anext(events)
            busy, idle = (one, two) if one.running else (two, one)
            idle._scripts.clear()
            before = len(idle.calls)
            await ask(pool, n=2)
            await ask(pool, affinity="c", n=2)
            assert len(idle.calls) == before + 2
            assert busy.running == 1
        assert [status.running for status in pool.statuses()] == [0, 0]
        assert sum(status.sessions for status in pool.statuses()) == 3


async def test_a_call_that_has_no_token_yet_goes_to_another_engine_at_once() -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes, poll_s=1000) as pool:
        one.go_down()
        for n in range(4):
            assert await ask(pool, affinity=f"s{n}", n=2)
        assert (await pool.score((1,), (300, 301), lora_path=None, extra_key=None)).log_probs
        assert len(two.calls) == 5
        (gone, _) = pool.statuses()
        assert (gone.is_in, gone.failures) == (False, 1), "one call found it out"
        two.go_down()
        with pytest.raises(EngineGone, match="is down"):
            await ask(pool)
        assert pool.statuses()[1].is_in, "one request is no proof: its health check tells"


async def test_one_request_that_every_engine_answers_badly_throws_none_out() -> None:
    fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes, poll_s=1000) as pool:
        for fake in fakes:
            fake.script(Scripted(ids=(), refuse=(500, "it cannot compute this")))
        with pytest.raises(EngineFaulty, match="cannot compute"):
            await ask(pool)
        assert not any(fake._scripts for fake in fakes)
        assert [(status.is_in, status.failures) for status in pool.statuses()] == [(True, 0)] * 2
        fakes[0].script(Scripted(ids=(), refuse=(500, "it is broken")))
        for _ in range(2):
            assert await ask(pool, n=2)
        assert [status.failures for status in pool.statuses()] == [1, 0]


async def test_a_reply_that_was_cut_is_its_callers_to_resume_and_meets_another_engine() -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        for fake in fakes:
            fake.script(Scripted(ids=(5, 6, 2), break_after=1))
        with pytest.raises(EngineLeft):
            await ask(pool, affinity="a")
        first, second = (one, two) if one.calls else (two, one)
        assert not second.calls
        second._scripts.clear()
        first.go_down()
        await ask(pool, affinity="a", n=2)
        assert len(second.calls) == 1


@pytest.mark.parametrize("was_met", [False, True])
async def test_replies_leave_a_host_that_vanished_though_no_connection_ends(was_met: bool) -> None:
    """was_met: another call found it out before the health checks did."""
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        for fake in fakes:
            fake.script(LONG)
        async with aclosing(pool.stream(request([1], affinity="a"))) as events:
            await anext(events)
            silent, other = (one, two) if one.running else (two, one)

            async def is_healthy() -> bool:
                return False

            silent.is_healthy = is_healthy  # type: ignore[method-assign]
            other._scripts.clear()
            if was_met:
                silent.script(Scripted(ids=(5,), break_after=0))
                assert await ask(pool, affinity="a", rid="met", n=2)
                assert len(silent.calls) == 2
            with pytest.raises(EngineGone):
                await anext(events)
        assert await ask(pool, affinity="a", n=2)
        assert len(other.calls) == 1 + was_met


async def test_an_engine_that_comes_back_gets_its_adapters_before_any_call(folder: Path) -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        await pool.load_adapter("policy-v1", folder)
        await pool.load_adapter("policy-v2", folder)
        one.go_down()
        await until(lambda: not pool.statuses()[0].is_in)
        await until(lambda: pool.statuses()[0].fault)
        await pool.unload_adapter("policy-v1")
        await pool.load_adapter("policy-v3", folder)
        assert sorted(two.adapters) == ["policy-v2", "policy-v3"]
        one.come_up()
        await until(lambda: pool.statuses()[0].is_in)
        assert sorted(one.adapters) == ["policy-v2", "policy-v3"]
        assert pool.statuses()[0].fault is None
        for n in range(4):
            assert await ask(pool, affinity=f"s{n}", lora_path="policy-v3", n=2)
        assert one.calls


async def test_an_engine_that_was_cut_off_loses_what_left_meanwhile(folder: Path) -> None:
    """It was not restarted: it still has what the others unloaded."""
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        await pool.load_adapter("policy-v1", folder)
        kept = dict(one.adapters)
        one.go_down()
        await until(lambda: pool.statuses()[0].fault)
        await pool.unload_adapter("policy-v1")
        one.adapters |= kept
        one.come_up()
        await until(lambda: pool.statuses()[0].is_in)
        assert (one.adapters, two.adapters) == ({}, {})


async def test_an_engine_that_dies_in_an_unload_loses_the_adapter_when_it_is_back(folder: Path) -> None:
    """A forgotten user's adapter must not stay on it."""
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        await pool.load_adapter("policy-v1", folder)
        unload = one.unload_adapter

        async def unanswered(name: str) -> None:
            one.unload_adapter = unload  # type: ignore[method-assign]
            raise EngineGone("the connection was lost")

        one.unload_adapter = unanswered  # type: ignore[method-assign]
        await pool.unload_adapter("policy-v1")
        await until(lambda: pool.statuses()[0].is_in)
        assert (one.adapters, two.adapters) == ({}, {})


async def test_an_engine_that_was_restarted_faster_than_anyone_looked_refuses_no_call(folder: Path) -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes, poll_s=1000) as pool:
        await pool.load_adapter("policy-v1", folder)
        one.adapters.clear()
        for n in range(4):
            assert await ask(pool, affinity=f"s{n}", lora_path="policy-v1", n=2)
        assert len(two.calls) == 4
        await until(lambda: pool.statuses()[0].is_in)  # it was asked at once, and has it again
        assert set(one.adapters) == {"policy-v1"}
        with pytest.raises(EngineRefused, match="never been loaded"):
            await ask(pool, lora_path="policy-v9")
        assert all(status.is_in for status in pool.statuses()), "the request is at fault, no engine"


async def test_an_engine_that_hangs_holds_up_no_adapter_of_the_others(folder: Path) -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes, poll_s=1000, change_s=1.0) as pool:
        async with one._changing:  # its unload waits for ever
            await pool.load_adapter("policy-v1", folder)
            assert [status.is_in for status in pool.statuses()] == [False, True]
        assert set(two.adapters) == {"policy-v1"}


async def test_an_adapter_that_one_engine_refuses_is_on_none(folder: Path) -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        with pytest.raises(EngineRefused, match="no such folder"):
            await pool.load_adapter("policy-v1", folder / "nowhere")

        async def full(*_: object) -> None:
            raise EngineRefused("no slot is free", status=400)

        two.load_adapter = full  # type: ignore[assignment,method-assign]
        with pytest.raises(EngineRefused, match="no slot"):
            await pool.load_adapter("policy-v2", folder)
        assert (one.adapters, await pool.adapter_folders()) == ({}, {})


async def test_a_reload_that_one_engine_refuses_takes_the_adapter_off_no_other(folder: Path) -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes, poll_s=1000) as pool:
        await pool.load_adapter("policy-v1", folder)
        two.adapters.clear()

        async def full(*_: object) -> None:
            raise EngineRefused("no slot is free", status=400)

        two.load_adapter = full  # type: ignore[assignment,method-assign]
        await pool.load_adapter("policy-v1", folder)
        assert set(one.adapters) == set(await pool.adapter_folders()) == {"policy-v1"}
        assert [status.is_in for status in pool.statuses()] == [True, False]


async def test_leaving_a_stream_aborts_it_on_its_engine_alone() -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        for fake in fakes:
            fake.script(LONG, LONG)
        async with aclosing(pool.stream(request([1], rid="kept"))) as kept:
            await anext(kept)
            async with aclosing(pool.stream(request([1], rid="left"))) as left:
                await anext(left)
            await until(lambda: one.aborted + two.aborted == ["left"])
            assert one.running + two.running == 1
            for fake in fakes:
                fake.release()
            assert [token async for event in kept for token in event.output_ids] == [6, 2]


async def test_an_engine_of_another_model_is_named_and_gets_nothing() -> None:
    fakes = FakeEngine(), FakeEngine(context_length=512)
    async with pool_of(fakes) as pool:
        (found,) = pool.strangers()
        assert "512 tokens" in found
        for _ in range(3):
            await ask(pool, n=2)
        assert not fakes[1].calls


async def test_full_weights_are_on_every_engine_and_on_one_that_comes_back(folder: Path) -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        assert (await pool.model_info()).weight_version == "default"
        await pool.pause("retract")
        await pool.flush_cache()
        await pool.update_weights(folder, 1)
        await pool.resume()
        assert (one.weight_version, two.weight_version) == (1, 1)
        assert (await pool.model_info()).weight_version == "1"
        one.weight_version = 0  # restarted faster than anyone looked
        await until(lambda: one.weight_version == 1)
        one.go_down()
        await until(lambda: pool.statuses()[0].fault)
        await pool.pause("retract")
        await pool.update_weights(folder, 2)
        one.come_up()
        one.weight_version = 0
        await pool.fault()  # it looks at each engine that is out
        assert not pool.statuses()[0].is_in, "no engine comes in while the others are swapped"
        await pool.resume()
        await until(lambda: pool.statuses()[0].is_in)
        assert one.weight_version == 2


class Embedded(FakeEngine):
    """Names the hash of the tensors that it started with, and none once they were replaced."""

    async def model_info(self) -> ModelInfo:
        info = await super().model_info()
        return info.model_copy(update={"base_hash": None}) if self.weight_version else info


async def test_an_engine_whose_tensors_were_replaced_is_no_stranger(folder: Path) -> None:
    fakes = Embedded(), Embedded()
    async with pool_of(fakes) as pool:
        await pool.update_weights(folder, 1)
        assert (await pool.ready()[0].model_info()).base_hash is None
        pool.every[0].leave("one of its calls failed")
        await until(lambda: pool.statuses()[0].is_in)
        assert not pool.strangers()


async def test_an_engine_whose_calls_fail_though_it_looks_well_waits_ever_longer_and_is_told() -> None:
    one = FakeEngine()
    async with pool_of((one, FakeEngine()), poll_s=0.001) as pool:
        one.script(*[Scripted(ids=(5,), refuse=None, break_after=0)] * 40)
        while pool.statuses()[0].fault is None:
            await ask(pool, n=2)
            await asyncio.sleep(0)
        assert "times in a row" in str(pool.statuses()[0].fault)
        one._scripts.clear()

        async def works() -> bool:
            await ask(pool, n=2)
            return pool.statuses()[0].fault is None

        async with asyncio.timeout(60):
            while not await works():
                await asyncio.sleep(0.01)


async def test_scores_are_the_same_on_each_engine(folder: Path) -> None:
    fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        await pool.load_adapter("policy-v1", folder)
        found = {
            (await engine.score((1,), (300, 301), lora_path="policy-v1", extra_key=None)).log_probs
            for engine in pool.ready()
        }
        assert len(found) == 1
        assert all(map(math.isfinite, found.pop()))


@pytest.mark.parametrize("hangs", [True, False])
async def test_an_engine_that_fails_a_score_of_its_own_leaves_while_others_serve(hangs: bool) -> None:
    one, _ = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes, poll_s=1000) as pool:
        may_end = asyncio.Event()

        async def fails(_: object) -> object:
            if hangs:
                await may_end.wait()
            raise EngineGone("it cannot score")

        one.generate = fails  # type: ignore[assignment,method-assign]
        with pytest.raises(EngineLeft):
            await pool.score_on(pool.ready()[0], 0.05, (1,), (300, 301), lora_path=None, extra_key="")
        may_end.set()
        assert [status.failures for status in pool.statuses()] == [1, 0]
        assert (await pool.score_on(pool.ready()[-1], 60, (1,), (300, 301), lora_path=None, extra_key="")).log_probs


async def test_a_score_that_failed_before_its_engine_came_back_takes_no_engine_out() -> None:
    one, _ = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes, poll_s=1000) as pool:

        async def fails(_: object) -> object:
            pool.every[0].leave("it was started again")
            pool.every[0].come_in()
            raise EngineGone("the connection was lost")

        one.generate = fails  # type: ignore[assignment,method-assign]
        with pytest.raises(EngineLeft):
            await pool.score_on(pool.ready()[0], 60, (1,), (300, 301), lora_path=None, extra_key="")
        assert [(status.failures, status.is_in) for status in pool.statuses()] == [(0, True), (0, True)]


async def test_an_engine_takes_no_weights_under_the_replies_that_it_still_runs(folder: Path) -> None:
    fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        for fake in fakes:
            fake.script(LONG)
        async with aclosing(pool.stream(request([1]))) as events:
            await anext(events)
            n = 0 if fakes[0].running else 1
            await pool.pause("retract")
            pool._members[n].failed("one of its calls failed, and this reply goes on")
            await pool.update_weights(folder, 1)
            assert [fake.weight_version for fake in fakes] == [n, 1 - n]
            await pool.resume()
            with pytest.raises(EngineGone):
                await anext(events)
        await until(lambda: pool.statuses()[n].is_in)
        assert [fake.weight_version for fake in fakes] == [1, 1]


async def test_a_failure_of_a_call_from_before_an_engine_left_is_not_the_fault_of_the_one_that_came_back() -> None:
    one, two = fakes = FakeEngine(), FakeEngine()
    async with pool_of(fakes) as pool:
        for fake in fakes:
            fake.script(LONG)
        async with aclosing(pool.stream(request([1], affinity="a"))) as events:
            await anext(events)
            member = pool.every[0 if one.running else 1]
            assert two.running + one.running == 1
            joins = member.joins
            member.leave("it was looked at")
            await until(lambda: member.is_in)
            assert member.joins == joins + 1
            member.engine.break_off()
            with pytest.raises(EngineLeft):
                await anext(events)
        assert member.is_in
        assert member.failures == 0

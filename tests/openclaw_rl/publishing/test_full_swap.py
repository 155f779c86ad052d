"""Replacing an engine's own weights under running chats, over the fake engine whose log-probs tell its weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from openclaw_rl.engines.admission import Closed, VersionAdmission
from openclaw_rl.errors import EngineError, EngineGone, EngineRefused
from openclaw_rl.proxy.generation import Decoding, EngineExtras, Generation, Sampled
from openclaw_rl.publishing.full_swap import FullWeightSwap
from openclaw_rl.testing import FakeEngine, Scripted
from openclaw_rl.testing.fake_engine import BASE_SEED, Pacing
from openclaw_rl.types import SamplingParams

PROMPT = (1, 5, 6)
FOLDER = Path("weights")
SLOW, FAST = 25.0, 2000.0
"""Tokens a second: while what is shown happens in the middle of replies, and after it."""


class World:
    def __init__(self, *, drain_s: float = 0.0, call_timeout_s: float = 120.0) -> None:
        self.engine = FakeEngine(pacing=Pacing(tokens_per_s=SLOW))
        self.serving = VersionAdmission(hold_s=120)
        self.serving.switch(0, None)
        self.begun: dict[int, Generation] = {}
        self.swapper = FullWeightSwap(
            self.engine, self.serving, drain_s=drain_s, call_timeout_s=call_timeout_s, push_timeout_s=120
        )

    async def chat(self, number: int, *, tokens: int = 60, json_schema: str | None = None) -> Sampled:
        running = self.begun[number] = Generation(
            self.engine,
            self.serving,
            rid=f"r{number}",
            prompt_ids=(*PROMPT, 7 + number),
            decoding=Decoding(
                SamplingParams(max_new_tokens=tokens), (), EngineExtras(json_schema=json_schema, ignore_eos=True)
            ),
        )
        async with running, aclosing(running.events()) as events:
            async for _ in events:
                pass
        return running.sampled

    def expected(self, number: int, sampled: Sampled) -> list[float]:
        """Each token's log-prob under the weights of the version that its run names."""
        ids, values, at = [*PROMPT, 7 + number, *sampled.ids], [], len(PROMPT) + 1
        for version, length in sampled.runs:
            for _ in range(length):
                values.append(self.engine.policy.log_prob(ids[: at + 1], at, BASE_SEED ^ version))
                at += 1
        return values


@asynccontextmanager
async def chats(world: World, n: int, **fields: object) -> AsyncIterator[list[asyncio.Task[Sampled]]]:
    """`n` chats in the middle of their replies, where they stay for seconds; behind the block they end soon."""
    tasks = [asyncio.create_task(world.chat(k, **fields)) for k in range(n)]  # type: ignore[arg-type]
    async with asyncio.timeout(120):
        while len(world.begun) < n or not all(running.sampled.ids for running in world.begun.values()):
            await asyncio.sleep(0.002)
    yield tasks
    world.engine.pacing.tokens_per_s = FAST


async def test_cut_replies_go_on_and_every_token_names_the_weights_that_sampled_it() -> None:
    world = World()
    async with chats(world, 8) as tasks:
        for version in (1, 2, 3):
            await world.swapper.swap(version, FOLDER)
            await asyncio.sleep(0.02)
    for number, sampled in enumerate(await asyncio.gather(*tasks)):
        assert (len(sampled.ids), sampled.finish, sampled.is_aligned) == (60, "length", True)
        assert sum(length for _, length in sampled.runs) == 60
        assert [version for version, _ in sampled.runs] == sorted({version for version, _ in sampled.runs})
        assert len(sampled.runs) > 1, "no reply was cut: the test shows nothing"
        assert sampled.log_probs == pytest.approx(world.expected(number, sampled))


async def test_who_arrives_during_a_swap_waits_and_gets_the_new_weights() -> None:
    world = World()
    world.serving.hold(Closed.SWAP)
    late = asyncio.create_task(world.chat(0, tokens=5))
    await asyncio.sleep(0)
    await world.swapper.swap(4, FOLDER)
    assert (await late).runs == [[4, 5]]


async def test_a_request_that_passed_the_gate_just_before_is_cut_too() -> None:
    """It reaches the engine while that is paused: the pause holds it, and it must not start on the new weights under
    the old version's name."""
    world = World()
    async with world.serving.use() as use:
        swap = asyncio.create_task(world.swapper.swap(1, FOLDER))
        await asyncio.sleep(0.12)
        assert not swap.done()  # a use of the old version may still ask the engine
        assert use.weight_version == 0
    await swap
    assert world.serving.current == 1


async def test_a_request_that_reaches_the_paused_engine_is_answered_by_the_old_weights_or_cut() -> None:
    """The engine holds it where no abort reaches it, and would start it on the new weights under the old name."""
    world = World()
    async with chats(world, 2) as tasks:
        paused, resumes = world.engine.pause, 0

        async def pause(mode: Literal["abort", "retract", "in_place"]) -> None:
            await paused(mode)
            if world.engine.weight_version == 0 and len(tasks) < 3:
                world.serving.release_hold(Closed.SWAP)  # as if it had passed a moment ago
                tasks.append(asyncio.create_task(world.chat(2)))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                world.serving.hold(Closed.SWAP)

        async def resume() -> None:
            nonlocal resumes
            resumes += 1
            await type(world.engine).resume(world.engine)

        world.engine.pause = pause  # type: ignore[method-assign]
        world.engine.resume = resume  # type: ignore[method-assign]
        await world.swapper.swap(1, FOLDER)
    assert resumes == 2, "the engine was let go on once, for the request that it held"
    for number, sampled in enumerate(await asyncio.gather(*tasks)):
        assert sampled.log_probs == pytest.approx(world.expected(number, sampled))
        assert (len(sampled.ids), sampled.runs[-1][0]) == (60, 1)


async def test_a_refused_push_leaves_the_old_version_serving() -> None:
    world = World()

    async def broken(folder: Path, weight_version: int) -> None:
        raise EngineRefused("no such weights", status=400)

    world.engine.update_weights = broken  # type: ignore[method-assign]
    async with chats(world, 2) as tasks:
        with pytest.raises(EngineError, match="no such weights"):
            await world.swapper.swap(1, FOLDER)
    assert world.serving.is_open
    assert world.serving.current == 0
    for sampled in await asyncio.gather(*tasks):
        assert sampled.runs == [[0, 60]]


async def test_a_reply_under_a_grammar_is_let_finish() -> None:
    world = World(drain_s=120.0)
    async with chats(world, 1, tokens=30, json_schema="{}") as (task,):
        times = await world.swapper.swap(1, FOLDER)
    assert (await task).runs == [[0, 30]]
    assert times.finish_s > 0


async def test_beyond_the_drain_it_is_cut_and_goes_on_without_its_grammar() -> None:
    world = World(drain_s=0.0)
    async with chats(world, 1, json_schema="{}") as (task,):
        await world.swapper.swap(1, FOLDER)
    sampled = await task
    assert sampled.is_joined
    assert [call.sampling_params.json_schema for call in world.engine.calls] == ["{}", None]


async def test_the_keeper_and_a_swap_each_open_their_own_lock() -> None:
    serving = VersionAdmission(hold_s=1)
    serving.switch(0, None)
    serving.hold()
    serving.hold(Closed.SWAP)
    serving.release_hold(Closed.SWAP)
    assert not serving.is_open
    serving.release_hold()
    assert serving.is_open


async def test_an_engine_that_never_lets_go_is_given_up_on() -> None:
    world = World(call_timeout_s=0.2)
    world.engine.script(Scripted(ids=(1, 2, 3)))
    async with world.serving.use():
        with pytest.raises(EngineGone, match="did not end within"):
            await world.swapper.swap(1, FOLDER)
    assert world.serving.is_open
    assert world.serving.current == 0

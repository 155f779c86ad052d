"""An engine that was away, or whose weights are unknown, gets back the version that should serve."""

from dataclasses import replace
from pathlib import Path

import pytest
from publishing import World, ends, is_served, publish, until

from openclaw_rl.engines.admission import Closed, VersionAdmission
from openclaw_rl.errors import EngineError, EngineGone
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.testing import FakeEngine
from openclaw_rl.types import VersionState


async def test_a_restarted_engine_gets_back_what_replies_still_use(world: World) -> None:
    first = await world.commit(sampled_by=0)
    await publish(world, first)
    async with world.serving.use(first):
        second = await world.commit(sampled_by=first)
        await publish(world, second)
        world.engine.go_down()
        world.engine.come_up()
        await world.publisher.restore()
        assert set(world.engine.adapters) == {"policy-v1", "policy-v2"}
    world.engine.go_down()
    world.engine.come_up()
    await world.publisher.restore()
    assert set(world.engine.adapters) == {"policy-v2"}


async def test_an_engine_that_comes_back_empty_gets_the_teacher_again(world: World) -> None:
    number = await world.commit(sampled_by=0, has_ema=True)
    world.publisher.wake()
    await until(lambda: is_served(world, number))
    world.engine.adapters.clear()
    await world.publisher.restore()
    assert set(world.engine.adapters) == {"ema-v1", "policy-v1"}


async def test_an_engine_that_lost_its_adapter_is_noticed_and_restored(world: World) -> None:
    assert await world.publisher.is_in_place()
    number = await world.commit(sampled_by=0)
    await publish(world, number)
    assert await world.publisher.is_in_place()
    world.engine.adapters.clear()  # it was restarted, and is well
    assert not await world.publisher.is_in_place()
    await world.publisher.restore()
    assert await world.publisher.is_in_place()


async def test_an_adapter_that_leaves_while_the_engine_is_asked_is_not_missed(world: World) -> None:
    policy = PolicyEngine(world.engine, world.serving, PublisherSettings(), world.folder, most_adapters=2)
    number = await world.commit(sampled_by=0)
    await policy.adapters.load(await world.ledger.version(number))
    asked = world.engine.adapter_folders

    async def left_meanwhile() -> object:
        await policy.adapters.unload(number)
        return await asked()

    world.engine.adapter_folders = left_meanwhile  # type: ignore[method-assign, assignment]
    assert await policy.is_in_place()


async def test_an_engine_that_came_back_empty_gets_the_serving_weights(full_world: World) -> None:
    number = await full_world.commit_full()
    full_world.publisher.wake()
    await ends(full_world, number, VersionState.SERVING)
    assert await full_world.publisher.is_in_place()
    full_world.engine.weight_version = 0  # it was restarted: the base
    assert not await full_world.publisher.is_in_place()
    await full_world.publisher.restore()
    assert full_world.engine.weight_version == number


async def test_a_push_without_an_answer_shuts_the_gate_until_what_should_serve_was_pushed(full_world: World) -> None:
    """The engine may still be reading the new weights: the version that it names is no proof."""
    base, folder = await full_world.ledger.version(0), full_world.folder
    engine, serving = FakeEngine(), VersionAdmission(120)
    policy = PolicyEngine(engine, serving, PublisherSettings(), folder, base_folder=folder / "base")
    await policy.restore(base, full_world.ledger.version)
    update, pushed = engine.update_weights, []

    async def unanswered(folder: Path, weight_version: int) -> None:
        raise EngineGone("silent")

    async def answered(folder: Path, weight_version: int) -> None:
        pushed.append((folder, weight_version))
        await update(folder, weight_version)

    engine.update_weights = unanswered  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="silent"):
        await policy.serve(replace(base, weight_version=1, folder="versions/one"))
    assert serving.is_closed_for(Closed.ENGINE)
    engine.update_weights = answered  # type: ignore[method-assign]
    for _ in range(2):  # the second time it is sure of what it pushed
        await policy.restore(base, full_world.ledger.version)
    assert pushed == [(folder / "base", 0)]


async def test_an_engine_that_a_swap_of_a_killed_server_left_paused_answers_again(full_world: World) -> None:
    """It outlives the server, and holds the version that should serve."""
    engine, serving = FakeEngine(), VersionAdmission(120)
    policy = PolicyEngine(engine, serving, PublisherSettings(), full_world.folder)
    await engine.pause("retract")
    await policy.restore(await full_world.ledger.version(0), full_world.ledger.version)
    assert serving.is_open
    assert engine._unpaused.is_set()

"""Versions on the engine for a comparison: loaded for its time, beside the one that serves."""

import pytest
from publishing import World, holds, publish, until

from openclaw_rl.errors import LedgerError


async def two_versions(world: World) -> tuple[int, int]:
    first = await world.commit(sampled_by=0)
    await publish(world, first)
    second = await world.commit(sampled_by=first)
    await publish(world, second)
    await until(lambda: holds(world, {f"policy-v{second}"}))
    return first, second


async def test_an_older_version_is_loaded_and_unloaded_while_chats_keep_theirs(world: World) -> None:
    first, second = await two_versions(world)
    async with world.publisher.lend(first) as use:
        assert (use.weight_version, use.lora_path) == (first, f"policy-v{first}")
        assert set(world.engine.adapters) == {f"policy-v{first}", f"policy-v{second}"}
        assert world.serving.current == second
    await until(lambda: holds(world, {f"policy-v{second}"}))


async def test_the_base_and_the_serving_version_need_no_load(world: World) -> None:
    _, second = await two_versions(world)
    for number, name in ((0, None), (second, f"policy-v{second}")):
        async with world.publisher.lend(number) as use:
            assert use.lora_path == name
    assert set(world.engine.adapters) == {f"policy-v{second}"}


@pytest.mark.parametrize("world", [{"max_versions": 2}], indirect=True)
async def test_a_full_engine_is_told(world: World) -> None:
    first, second = await two_versions(world)
    async with world.serving.use(second):
        third = await world.commit(sampled_by=second)
        await publish(world, third)
        with pytest.raises(LedgerError, match="the engine holds 2 versions"):
            async with world.publisher.lend(first):
                pass
    with pytest.raises(LedgerError, match="no version 9"):
        async with world.publisher.lend(9):
            pass


async def test_full_weights_replace_each_other(full_world: World) -> None:
    number = await full_world.commit_full()
    await publish(full_world, number)
    async with full_world.publisher.lend(number) as use:
        assert use.weight_version == number
    with pytest.raises(LedgerError, match="replace each other"):
        async with full_world.publisher.lend(0):
            pass


async def test_the_gates_measurements_stay_with_the_version(world: World) -> None:
    number = await world.commit(sampled_by=0)
    await publish(world, number)
    (version,) = await world.ledger.versions(since=number)
    assert version.report.metrics["gate_kl_parent"] == version.report.metrics["gate_kl_base"]

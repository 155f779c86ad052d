"""Adapters on the engine: loaded beside those that replies use, unloaded when no reply does."""

import asyncio
from pathlib import Path

import pytest
from publishing import World, holds, is_served, publish, until

from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest


async def test_a_running_reply_keeps_its_adapter_until_it_ends(world: World) -> None:
    first = await world.commit(sampled_by=0)
    await publish(world, first)
    async with world.serving.use() as use:
        assert use.weight_version == first
        second = await world.commit(sampled_by=first)
        await publish(world, second)
        await asyncio.sleep(0.05)
        assert set(world.engine.adapters) == {"policy-v1", "policy-v2"}
        request = GenerateRequest(
            input_ids=[1],
            sampling_params=EngineSampling(max_new_tokens=2),
            lora_path=use.lora_path,
            extra_key=use.extra_key,
        )
        assert (await world.engine.generate(request)).output_ids

    async def unloaded() -> bool:
        world.publisher.wake()
        return set(world.engine.adapters) == {"policy-v2"}

    await until(unloaded)


async def test_an_ema_teacher_is_loaded_beside_its_version_and_leaves_with_it(world: World) -> None:
    first = await world.commit(sampled_by=0, has_ema=True)
    world.publisher.wake()
    await until(lambda: is_served(world, first))
    assert {"ema-v1", "policy-v1"} <= set(world.engine.adapters)
    async with world.serving.use() as use:
        assert (use.lora_path, use.ema_path) == ("policy-v1", "ema-v1")
        second = await world.commit(sampled_by=first)  # its trainer keeps no teacher any more
        world.publisher.wake()
        await until(lambda: is_served(world, second))
        assert {"ema-v1", "policy-v1", "policy-v2"} <= set(world.engine.adapters), "a scoring call still uses them"
    async with world.serving.use() as use:
        assert (use.lora_path, use.ema_path) == ("policy-v2", "policy-v2")
    await until(lambda: holds(world, {"policy-v2"}))


async def test_an_adapter_that_another_run_left_under_that_name_is_replaced(world: World, tmp_path: Path) -> None:
    """An attached engine outlives the server; what it has as `policy-v1` may be another data directory's."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_model.safetensors").write_bytes(b"other")
    await world.engine.load_adapter("policy-v1", tmp_path / "other")
    number = await world.commit(sampled_by=0)
    await publish(world, number)
    folders = await world.engine.adapter_folders()
    assert folders == {"policy-v1": str(world.folder / ((await world.ledger.version(number)).folder or ""))}


@pytest.mark.parametrize("world", [{"keep_versions": 2}], indirect=True)
async def test_what_is_remembered_of_versions_ends_with_their_weights(world: World) -> None:
    for number in range(1, 7):
        assert await world.commit(sampled_by=world.serving.current, has_ema=number == 3) == number
        await publish(world, number)

    async def is_pruned() -> bool:
        return len(await world.ledger.version_folders()) == 5

    await until(is_pruned)
    async with world.publisher._swap:  # the pruning is over
        assert set(world.publisher._adapters._ours) == {f"policy-v{number}" for number in (1, 2, 4, 5, 6)}
    assert set(world.serving._lora_paths) <= {0}

"""One version's way to serving, of an adapter and of full weights. Over the real ledger and a fake engine."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from publishing import Drifted, Speechless, World, ends, publish, until
from safetensors.numpy import save

from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.toy_policy import BASE_SEED
from openclaw_rl.types import VersionState


async def test_a_commit_is_gated_loaded_tested_and_served(world: World) -> None:
    number = await world.commit(sampled_by=0)
    await publish(world, number)
    assert world.publisher.last_gate is not None
    assert world.publisher.last_gate.step_kl is not None
    assert list(world.engine.adapters) == ["policy-v1"]
    assert await world.state(0) is VersionState.RETIRED


async def test_weights_that_are_no_numbers_never_reach_the_engine_whatever_was_measured(world: World) -> None:
    spoilt = {"q.lora_A.weight": np.ones((2, 3), np.float32), "q.lora_B.weight": np.array([1.0, np.nan], np.float32)}
    number = await world.commit(sampled_by=0, weights=save(spoilt))
    world.publisher.wake()

    async def rejected() -> bool:
        return await world.state(number) is VersionState.REJECTED

    await until(rejected)
    said = "adapter_model.safetensors: q.lora_B.weight holds what is not a finite number"
    assert (await world.ledger.version(number)).reason == said
    assert (await world.ledger.counts())["dropped.gate_rejected"] == 1
    assert world.serving.current == 0
    assert "policy-v1" not in world.engine.folders, "it was never loaded"
    await publish(world, await world.commit(sampled_by=0, weights=save({"q.lora_A.weight": spoilt["q.lora_A.weight"]})))


async def test_full_weights_are_pushed_compared_with_those_before_and_served(full_world: World) -> None:
    full_world.engine.policy = Drifted(lost={1: 0.2})
    number = await full_world.commit_full()
    full_world.publisher.wake()
    await ends(full_world, number, VersionState.SERVING)
    assert (full_world.serving.current, full_world.engine.weight_version) == (1, 1)
    assert full_world.publisher.last_gate is not None
    assert full_world.publisher.last_gate.step_kl == pytest.approx(0.2)
    async with full_world.serving.use() as use:
        assert (use.lora_path, use.extra_key) == (None, "v1")


async def test_full_weights_that_drift_are_swapped_back_whatever_their_trainer_measured(full_world: World) -> None:
    full_world.engine.policy = Drifted(lost={1: 0.7})
    number = await full_world.commit_full(step=0.1)
    full_world.publisher.wake()
    await ends(full_world, number, VersionState.REJECTED)
    assert (await full_world.ledger.version(number)).reason == "KL(v0 || v1) = 0.700 > 0.5"
    assert (full_world.serving.current, full_world.engine.weight_version) == (0, 0)
    assert (await full_world.ledger.counts())["dropped.gate_rejected"] == 1


async def test_an_engine_that_came_back_empty_is_compared_with_no_version(
    full_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the base, and not what the ledger says: the publisher waits until the engine is restored."""
    monkeypatch.setattr("openclaw_rl.publishing.publisher.RETRY_S", 0.01)
    full_world.engine.policy = Drifted(lost={1: 0.4, 2: 0.8})
    await full_world.publisher.restore()
    first = await full_world.commit_full()
    full_world.publisher.wake()
    await ends(full_world, first, VersionState.SERVING)
    number = await full_world.commit_full()
    full_world.engine.weight_version = 0  # it was restarted
    full_world.publisher.wake()
    async with asyncio.timeout(120):
        while not any(told.startswith("publisher: failed") for told in full_world.health.problems()):
            await asyncio.sleep(0.005)
    assert await full_world.state(number) is VersionState.LOADING
    await full_world.publisher.restore()
    await ends(full_world, number, VersionState.SERVING)
    assert full_world.publisher.last_gate is not None
    assert full_world.publisher.last_gate.step_kl == pytest.approx(0.4)


async def test_a_step_beyond_the_bound_is_never_pushed(full_world: World) -> None:
    number = await full_world.commit_full(step=9.0)
    full_world.publisher.wake()
    await ends(full_world, number, VersionState.REJECTED)
    assert full_world.engine.weight_version == 0


async def test_weights_that_are_not_the_trainers_are_swapped_back(full_world: World) -> None:
    number = await full_world.commit_full(probe_error=0.5)
    full_world.publisher.wake()
    await ends(full_world, number, VersionState.REJECTED)
    assert (full_world.serving.current, full_world.engine.weight_version) == (0, 0)
    assert (await full_world.ledger.tip()).weight_version == 0


async def test_weights_that_the_engine_has_no_numbers_for_are_swapped_back(full_world: World) -> None:
    number = await full_world.commit_full()
    full_world.engine.policy = Speechless(seeds=frozenset({BASE_SEED ^ number}))
    full_world.publisher.wake()
    await ends(full_world, number, VersionState.REJECTED)
    assert f"no numbers for version {number}" in ((await full_world.ledger.version(number)).reason or "")
    assert (full_world.serving.current, full_world.engine.weight_version) == (0, 0)


@pytest.mark.parametrize("breaks", ["before", "in between"])
async def test_an_engine_that_has_no_numbers_at_all_condemns_no_weights(
    full_world: World, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    """The publisher waits for it: it makes no swap, or puts the old version back if the swap was made."""
    monkeypatch.setattr("openclaw_rl.publishing.publisher.RETRY_S", 0.01)
    number = await full_world.commit_full()
    mute = Speechless(seeds=frozenset({BASE_SEED, BASE_SEED ^ number}))
    pushed, push = [], full_world.engine.update_weights

    async def update_weights(folder: Path, weight_version: int) -> None:
        pushed.append(weight_version)
        full_world.engine.policy = mute
        await push(folder, weight_version)

    full_world.engine.update_weights = update_weights  # type: ignore[method-assign]
    if breaks == "before":
        full_world.engine.policy = mute
    full_world.publisher.wake()
    async with asyncio.timeout(120):
        while not any(told.startswith("publisher: failed") for told in full_world.health.problems()):
            await asyncio.sleep(0.005)
    assert pushed == ([] if breaks == "before" else [number, 0])
    assert (await full_world.ledger.version(number)).state is VersionState.LOADING
    assert (full_world.serving.current, full_world.engine.weight_version) == (0, 0)
    full_world.engine.update_weights = push  # type: ignore[method-assign]
    full_world.engine.policy = ToyPolicy()
    await ends(full_world, number, VersionState.SERVING)
    assert full_world.serving.current == number


def assert_timed_once(world: World) -> None:
    assert world.health.gate.cumulative()[-1] == ("+Inf", 1.0)
    assert world.health.push.cumulative()[-1] == ("+Inf", 1.0)
    assert 0 < world.health.push.total_s < 30


async def test_the_gate_and_the_load_of_an_adapter_are_timed(world: World) -> None:
    await publish(world, await world.commit(sampled_by=0))
    assert_timed_once(world)


async def test_the_gate_and_the_push_of_full_weights_are_timed(full_world: World) -> None:
    number = await full_world.commit_full()
    full_world.publisher.wake()
    await ends(full_world, number, VersionState.SERVING)
    assert_timed_once(full_world)

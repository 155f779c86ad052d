"""The publisher over the real ledger and a fake engine: gate, self-test, switch, drain, restore, rollback."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from publishing import PROMPT, World, publish, until
from safetensors.numpy import save

from openclaw_rl.engines.serving import ServingVersions, adapter_name
from openclaw_rl.errors import EngineGone, LedgerError
from openclaw_rl.publishing.canary import Canary
from openclaw_rl.publishing.gate import Gate
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.toy_policy import BASE_SEED, adapter_seed
from openclaw_rl.trainers.api import Report
from openclaw_rl.types import LogProbs, VersionState


async def test_a_commit_is_gated_loaded_tested_and_served(world: World) -> None:
    number = await world.commit(sampled_by=0)
    await publish(world, number)
    assert world.publisher.last_gate is not None
    assert world.publisher.last_gate.step_kl is not None
    assert list(world.engine.adapters) == ["policy-v1"]
    assert await world.state(0) is VersionState.RETIRED


@pytest.mark.parametrize("world", [{"max_step_kl": 1e-9, "max_base_kl": 10.0}, {"max_base_kl": 1e-9}], indirect=True)
async def test_a_step_beyond_a_kl_bound_is_rejected_and_the_old_versionis_served(world: World) -> None:
    number = await world.commit(sampled_by=0)
    world.publisher.wake()

    async def rejected() -> bool:
        return await world.state(number) is VersionState.REJECTED

    # The toy policy's KL is of either sign: take steps until one is beyond the bound.
    for _ in range(60):
        await asyncio.sleep(0.05)
        if await rejected():
            break
        number = await world.commit(sampled_by=world.serving.current)
        world.publisher.wake()
    await until(rejected)
    assert "KL(" in ((await world.ledger.version(number)).reason or "")
    assert (await world.ledger.tip()).weight_version == (await world.ledger.version(number)).parent
    assert world.serving.current != number
    assert adapter_name(number) not in world.engine.adapters


async def test_an_engine_that_disagrees_with_the_trainer_never_serves_the_version(world: World) -> None:
    number = await world.commit(sampled_by=0, probe_error=0.2)
    world.publisher.wake()

    async def rejected() -> bool:
        return await world.state(number) is VersionState.REJECTED

    await until(rejected)
    assert "self-test" in ((await world.ledger.version(number)).reason or "")
    assert world.serving.current == 0


async def test_three_rejections_in_a_row_pause_learning(world: World) -> None:
    for _ in range(3):
        number = await world.commit(sampled_by=0, probe_error=0.2)
        world.publisher.wake()

        async def rejected(n: int = number) -> bool:
            return await world.state(n) is VersionState.REJECTED

        await until(rejected)

    async def paused() -> bool:
        return not await world.ledger.learning()

    await until(paused)


async def test_of_two_waiting_commits_the_newer_serves_and_the_older_is_superseded(world: World) -> None:
    await world.ledger.set_pin(0)  # nothing is published meanwhile
    first = await world.commit(sampled_by=0)
    second = await world.commit(sampled_by=0)
    await world.ledger.set_pin(None)
    await publish(world, second)

    async def superseded() -> bool:
        return await world.state(first) is VersionState.SUPERSEDED

    await until(superseded)
    assert list(world.engine.adapters) == ["policy-v2"]


async def test_a_pin_holds_publishing_and_serves_its_version(world: World) -> None:
    first = await world.commit(sampled_by=0)
    await publish(world, first)
    await world.publisher.pin(0)
    second = await world.commit(sampled_by=0)
    world.publisher.wake()
    await asyncio.sleep(0.1)
    assert world.serving.current == 0
    assert await world.state(second) is VersionState.CANDIDATE
    await world.publisher.pin(None)
    await publish(world, second)


async def test_after_a_pin_the_newest_version_serves_again_without_a_new_commit(world: World) -> None:
    first = await world.commit(sampled_by=0)
    await publish(world, first)
    await world.publisher.pin(0)
    assert (world.serving.current, await world.ledger.serving_version()) == (0, 0)
    await world.publisher.pin(None)
    await publish(world, first)


async def test_a_version_passed_over_serves_when_the_newer_one_is_refused(world: World) -> None:
    await world.ledger.set_pin(0)
    first = await world.commit(sampled_by=0)
    second = await world.commit(sampled_by=0, probe_error=1.0)
    await world.publisher.pin(None)
    await publish(world, first)
    assert await world.state(second) is VersionState.REJECTED
    assert list(world.engine.adapters) == ["policy-v1"]


async def test_a_candidate_that_never_passed_the_gate_cannot_be_pinned_into_service(world: World) -> None:
    await world.ledger.set_pin(0)
    number = await world.commit(sampled_by=0)
    with pytest.raises(LedgerError):
        await world.publisher.pin(number)
    assert world.serving.current == 0
    assert await world.ledger.pinned() == 0


async def test_a_version_that_was_gone_back_from_is_refused_as_such_whether_or_not_its_weights_are_there(
    world: World,
) -> None:
    first = await world.commit(sampled_by=0)
    await publish(world, first)
    await world.ledger.rollback(0, requeue=False)
    await world.publisher.follow()
    for _ in range(2):
        with pytest.raises(LedgerError, match=f"version {first} is rolled_back and cannot be pinned"):
            await world.publisher.pin(first)
        await world.ledger.prune_weights(first, 20)
    assert world.serving.current == 0
    assert await world.ledger.pinned() is None


async def test_a_rollback_is_followed_and_survives_an_engine_that_was_down(world: World) -> None:
    first = await world.commit(sampled_by=0)
    await publish(world, first)
    second = await world.commit(sampled_by=first)
    await publish(world, second)
    world.engine.go_down()
    await world.ledger.rollback(first, requeue=False)
    with pytest.raises(EngineGone):
        await world.publisher.restore()
    world.engine.come_up()
    await world.publisher.restore()
    assert world.serving.current == first
    assert list(world.engine.adapters) == ["policy-v1"]


async def test_a_restart_serves_what_the_ledger_says_and_finishes_what_was_begun(world: World) -> None:
    first = await world.commit(sampled_by=0)
    await publish(world, first)
    await world.ledger.set_pin(first)
    second = await world.commit(sampled_by=first)
    await world.ledger.set_version_state(second, VersionState.GATED)
    await world.ledger.set_pin(None)
    serving = ServingVersions(5.0)
    world.engine.go_down()
    world.engine.come_up()
    again = Publisher(world.ledger, world.engine, serving, PublisherSettings(), world.folder)
    await again.restore()
    assert serving.current == first
    task = asyncio.create_task(again.run())

    async def serves() -> bool:
        return serving.current == second and await world.state(second) is VersionState.SERVING

    await until(serves)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_steps_that_come_faster_than_gates_are_served_all_the_same(world: World) -> None:
    """Seen on a real engine: while each gate ran another commit came, and nothing was ever served."""
    check = world.publisher._gate.check
    made = []

    async def another_commit_comes(*args: object) -> object:
        if len(made) < 6:
            made.append(await world.commit(sampled_by=world.serving.current))
        return await check(*args)  # type: ignore[arg-type]

    world.publisher._gate.check = another_commit_comes  # type: ignore[method-assign,assignment]
    first = await world.commit(sampled_by=0)
    served = []
    switch = world.serving.switch
    world.serving.switch = lambda n, path: (served.append(n), switch(n, path))[1]  # type: ignore[method-assign]
    world.publisher.wake()

    async def newest_serves() -> bool:
        return world.serving.current == first + 6

    await until(newest_serves)
    assert len(served) > 3


async def test_what_a_crash_left_behind_the_serving_version_neveris_served(world: World) -> None:
    await world.ledger.set_pin(0)
    first = await world.commit(sampled_by=0)
    second = await world.commit(sampled_by=0)
    for state in (VersionState.GATED, VersionState.LOADING, VersionState.SERVING):
        await world.ledger.set_version_state(second, state)
    await world.ledger.set_pin(None)
    await publish(world, second)

    async def superseded() -> bool:
        return await world.state(first) is VersionState.SUPERSEDED

    await until(superseded)
    assert world.serving.current == second


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_version_under_which_canaries_are_lost_is_refused(world: World, is_lost: bool) -> None:
    number = await world.commit(sampled_by=0)
    version = await world.ledger.version(number)
    assert version.folder is not None
    seeds = {0: BASE_SEED, number: adapter_seed(world.folder / version.folder)}

    async def score(n: int, prompt: tuple[int, ...], reply: tuple[int, ...]) -> tuple[float, ...]:
        return world.engine.policy.log_probs((*prompt, *reply), len(prompt), seeds[n])

    async def drop(reply: tuple[int, ...]) -> float:
        base, new = await score(0, PROMPT, reply), await score(number, PROMPT, reply)
        return (sum(base) - sum(new)) / len(reply)

    replies = [(token, token + 1) for token in range(400, 420)]
    drops = {reply: await drop(reply) for reply in replies}
    reply = max(replies, key=lambda r: drops[r] if is_lost else -drops[r])
    assert (drops[reply] > 0) is is_lost
    settings = PublisherSettings(max_canary_drop=1e-6)
    gate = Gate(world.ledger, world.serving, score, settings, canaries=[Canary(PROMPT, reply)])
    result = await gate.check(version, Report(metrics={"loss": 0.1}, probes=[]))
    assert result.canary_drop == pytest.approx(drops[reply])
    assert result.refusal == (f"canaries lost {drops[reply]:.3f} nats per token > 1e-06" if is_lost else None)


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


@dataclass(frozen=True, slots=True)
class Speechless(ToyPolicy):
    """Has no numbers under these seeds."""

    seeds: frozenset[int] = frozenset()

    def log_probs(self, ids: Sequence[int], start: int, seed: int) -> LogProbs:
        said = ToyPolicy.log_probs(self, ids, start, seed)
        return (math.nan,) * len(said) if seed in self.seeds else said


@pytest.mark.parametrize("has_probe", [True, False])
@pytest.mark.parametrize("sampled", [True, False], ids=["on a reply", "on none of the parent"])
async def test_a_version_that_the_engine_has_no_numbers_for_is_refused(
    world: World, has_probe: bool, sampled: bool
) -> None:
    """Finite weights overflow, too; with or without probes, or replies of the parent."""
    if not sampled:
        await publish(world, await world.commit(sampled_by=0))
    number = await world.commit(sampled_by=0, has_probe=has_probe)
    folder = (await world.ledger.version(number)).folder
    assert folder is not None
    world.engine.policy = Speechless(seeds=frozenset({adapter_seed(world.folder / folder)}))
    world.publisher.wake()

    async def rejected() -> bool:
        return await world.state(number) is VersionState.REJECTED

    await until(rejected)
    assert f"the engine has no numbers for version {number}" in ((await world.ledger.version(number)).reason or "")
    assert world.serving.current == number - 1


async def test_an_engine_that_has_no_numbers_at_all_costs_no_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openclaw_rl.publishing.publisher.RETRY_S", 0.01)
    number = await world.commit(sampled_by=0)
    folder = (await world.ledger.version(number)).folder
    assert folder is not None
    world.engine.policy = Speechless(seeds=frozenset({BASE_SEED, adapter_seed(world.folder / folder)}))
    world.publisher.wake()

    async def fails() -> bool:
        return any(problem.startswith("publisher: failed") for problem in world.meters.problems())

    await until(fails)
    assert await world.state(number) is VersionState.CANDIDATE
    world.engine.policy = ToyPolicy()
    await publish(world, number)

    async def works() -> bool:
        return not world.meters.problems()

    await until(works)

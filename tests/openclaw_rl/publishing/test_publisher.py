"""The publisher: which version serves and when the next is tried. Over the real ledger and a fake engine."""

import asyncio

import pytest
from publishing import Speechless, World, publish, until

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.base import Score
from openclaw_rl.errors import EngineError, EngineGone, LedgerError, LedgerUnavailable
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.toy_policy import BASE_SEED, adapter_seed
from openclaw_rl.types import VersionState


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


async def test_the_ledger_names_a_pinned_version_only_after_the_engine_serves_it(full_world: World) -> None:
    """An engine that fails once must not bring the version into service later, unpinned."""
    world = full_world
    first = await world.commit_full()
    await publish(world, first)
    second = await world.commit_full()
    await publish(world, second)
    world.engine.go_down()
    with pytest.raises(EngineError):
        await world.publisher.pin(first)
    assert (await world.ledger.serving_version(), await world.ledger.pinned()) == (second, None)
    world.engine.come_up()
    await world.publisher.restore()
    assert world.serving.current == second
    await world.publisher.pin(first)
    assert (world.serving.current, await world.ledger.serving_version(), await world.ledger.pinned()) == (first,) * 3


async def test_a_pin_that_the_ledger_cannot_take_is_undone_on_the_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await world.commit(sampled_by=0)
    await publish(world, first)

    async def no_room(*args: object, **kwargs: object) -> None:
        raise LedgerUnavailable("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(world.ledger, "set_pin", no_room)
        with pytest.raises(LedgerUnavailable):
            await world.publisher.pin(0)
    await publish(world, first)
    assert await world.ledger.pinned() is None


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
    serving = VersionAdmission(5.0)
    world.engine.go_down()
    world.engine.come_up()
    settings = PublisherSettings()
    again = Publisher(world.ledger, PolicyEngine(world.engine, serving, settings, world.folder), settings)
    await again.restore()
    assert serving.current == first
    task = asyncio.create_task(again.run())

    async def serves() -> bool:
        return serving.current == second and await world.state(second) is VersionState.SERVING

    await until(serves)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_steps_that_come_faster_than_gates_are_served_all_the_same(world: World) -> None:
    """Seen on a real engine: while each gate ran another commit came, and no version was ever served."""
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
    world.serving.switch = lambda n, *more: (served.append(n), switch(n, *more))[1]  # type: ignore[method-assign]
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
        return any(problem.startswith("publisher: failed") for problem in world.health.problems())

    await until(fails)
    assert await world.state(number) is VersionState.CANDIDATE
    world.engine.policy = ToyPolicy()
    await publish(world, number)

    async def works() -> bool:
        return not world.health.problems()

    await until(works)


async def test_what_a_pin_brings_back_is_not_unloaded_under_it(world: World) -> None:
    """An idle adapter is about to be unloaded when an operator pins its version."""
    first = await world.commit(sampled_by=0)
    await publish(world, first)
    async with world.serving.use(first):  # a running reply keeps the first one loaded
        second = await world.commit(sampled_by=first)
        await publish(world, second)
        swap = world.publisher._swap
        await swap.acquire()

    async def waits(count: int) -> None:
        async with asyncio.timeout(120):
            while len(swap._waiters or ()) < count:
                await asyncio.sleep(0.001)

    pinning = asyncio.create_task(world.publisher.pin(first))
    await waits(1)  # for the swap at hand
    unloading = asyncio.create_task(world.publisher._retire_idle())
    await waits(2)  # behind the pin
    swap.release()
    await asyncio.gather(pinning, unloading)
    assert world.serving.current == first
    assert list(world.engine.adapters) == ["policy-v1"]


async def test_a_step_that_begins_takes_the_figures_of_the_present_versions_before_its_gate(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the step runs. The gate then scores the new version alone."""
    await publish(world, await world.commit(sampled_by=0))
    await world.sampled(1)
    asked: list[str | None] = []
    score = world.engine.score

    async def counted(*args: object, lora_path: str | None, **kwargs: object) -> Score:
        asked.append(lora_path)
        return await score(*args, lora_path=lora_path, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(world.engine, "score", counted)
    world.publisher.step_begins()

    async def prepared() -> bool:
        return "policy-v1" in asked

    await until(prepared)
    asked.clear()
    await publish(world, await world.commit(sampled_by=1))
    assert set(asked) == {"probe", "policy-v2"}  # the probe is the trainer's


async def test_a_gate_that_is_being_prepared_delays_no_pin_and_a_pin_needs_no_gate(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await world.commit(sampled_by=0)
    await publish(world, first)
    await world.sampled(first)
    score, asked, goes_on = world.engine.score, asyncio.Event(), asyncio.Event()

    async def slow(*args: object, **kwargs: object) -> Score:
        asked.set()
        await goes_on.wait()
        return await score(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(world.engine, "score", slow)
    world.publisher.step_begins()
    await asked.wait()
    async with asyncio.timeout(60):  # the preparation is held until the pin has returned
        await world.publisher.pin(0)
    assert (world.serving.current, world.serving.users(first)) == (0, 1)
    assert f"policy-v{first}" in world.engine.adapters  # still scored on
    goes_on.set()

    async def is_idle() -> bool:
        return not world.serving.users(first)

    await until(is_idle)
    asked.clear()
    world.publisher._step_runs = True
    await world.publisher._prepare_gate()
    assert not asked.is_set()


async def test_a_gate_that_cannot_be_prepared_harms_no_version(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.sampled(0)
    score, fails = world.engine.score, True

    async def failing(*args: object, **kwargs: object) -> Score:
        if fails:
            raise EngineGone("away")
        return await score(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(world.engine, "score", failing)
    world.publisher.step_begins()
    await asyncio.sleep(0.05)
    fails = False
    assert not world.health.is_failing("publisher")
    await publish(world, await world.commit(sampled_by=0))

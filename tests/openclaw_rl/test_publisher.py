"""The publisher over the real ledger and a fake engine: gate, self-test, switch, drain, restore, rollback."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from openclaw_rl.canary import Canary
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.engines.serving import ServingVersions, adapter_name
from openclaw_rl.errors import EngineGone, LedgerError
from openclaw_rl.gate import Gate
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.publisher import Publisher
from openclaw_rl.settings import PublisherSettings, TrainingSettings
from openclaw_rl.testing import FakeEngine
from openclaw_rl.testing.toy_policy import BASE_SEED, adapter_seed
from openclaw_rl.trainers.api import Commit, Manifest, Probe, Report
from openclaw_rl.types import (
    NextState,
    Request,
    Sample,
    SamplingParams,
    Scope,
    Turn,
    TurnKey,
    Verdict,
    VersionRun,
    VersionState,
    WeightKind,
)

PROMPT, REPLY = (1, 5, 9), (11, 12, 13, 14)


class World:
    """A ledger, an engine and a publisher between them."""

    def __init__(self, ledger: Ledger, engine: FakeEngine, folder: Path, settings: PublisherSettings) -> None:
        self.ledger, self.engine, self.folder = ledger, engine, folder
        self.serving = ServingVersions(5.0)
        self.publisher = Publisher(ledger, engine, self.serving, settings, folder)
        self.count = 0

    async def sampled(self, version: int) -> None:
        self.count += 1
        turn_id = f"turn-{self.count}"
        scope = Scope("u", "s")
        messages = (Message(role="user", content="q"),)
        await self.ledger.begin(
            Request(f"r-{self.count}", scope, 0.0, messages, None, None, PROMPT, SamplingParams(max_new_tokens=8))
        )
        runs = (VersionRun(version, len(REPLY)),)
        lps = self.engine.policy.log_probs((*PROMPT, *REPLY), len(PROMPT), self._seed(version))
        mask = (True,) * len(REPLY)
        reply = Message(role="assistant", content="a")
        turn = Turn(turn_id, f"r-{self.count}", 0.0, REPLY, lps, mask, runs, "stop", reply)
        await self.ledger.finish(turn, TurnKey("r", "b", "h"))
        thanks = NextState((Message(role="user", content="thanks"),))
        await self.ledger.pair(turn_id, thanks, by_request_id=f"r-{self.count}")
        await self.ledger.record_verdict(turn_id, Verdict(1, (1,), "rules"))
        await self.ledger.record_sample(Sample(turn_id, PROMPT, REPLY, mask, lps, runs, 0.7, reward=1.0))

    def _seed(self, version: int) -> int:
        return self.engine.adapters.get(adapter_name(version) or "", 0)

    async def commit(
        self,
        *,
        sampled_by: int,
        probe_error: float = 0.0,
        metrics: dict[str, float] | None = None,
        has_ema: bool = False,
    ) -> int:
        """One step: its adapter's bytes are its lease's name; its probe is what the engine will answer, less an
        error.
        """
        await self.sampled(sampled_by)
        lease = await self.ledger.lease(trainer="test", now=True)
        assert lease is not None
        folder = self.folder / "versions" / lease.lease_id
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(lease.lease_id.encode())
        if has_ema:
            (folder / "ema").mkdir()
            (folder / "ema" / "adapter_model.safetensors").write_bytes(b"a mean")
        await self.engine.load_adapter("probe", folder)
        lps = (await self.engine.score(PROMPT, REPLY, lora_path="probe", extra_key=None)).log_probs
        await self.engine.unload_adapter("probe")
        probe = Probe(
            prompt_ids=list(PROMPT),
            response_ids=list(REPLY),
            log_probs=[lp + probe_error for lp in lps],
            parent_log_probs=[lp + 0.01 for lp in lps],
        )
        manifest = Manifest(folder=f"versions/{lease.lease_id}", kind=WeightKind.LORA, base_hash="base", sha256="x")
        report = Report(metrics=metrics or {"loss": 0.1}, probes=[probe])
        body = Commit(lease_id=lease.lease_id, fence=lease.fence, parent=lease.parent, manifest=manifest, report=report)
        return await self.ledger.commit(body)

    async def state(self, number: int) -> VersionState:
        return (await self.ledger.version(number)).state


async def until(condition: object) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    settings = PublisherSettings(**getattr(request, "param", {}))
    identity = Identity("base", "tokenizer", "tiny")
    ledger = await Ledger.open(tmp_path / "ledger.sqlite3", identity=identity, training=TrainingSettings(min_batch=1))
    world = World(ledger, FakeEngine(), tmp_path, settings)
    await world.publisher.restore()
    task = asyncio.create_task(world.publisher.run())
    yield world
    assert not task.done(), task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await ledger.aclose()


async def publish(world: World, number: int) -> None:
    world.publisher.wake()

    async def serves() -> bool:
        return await world.state(number) is VersionState.SERVING and world.serving.current == number

    await until(serves)


async def test_a_commit_is_gated_loaded_tested_and_served(world: World) -> None:
    number = await world.commit(sampled_by=0)
    await publish(world, number)
    assert world.publisher.last_gate is not None
    assert world.publisher.last_gate.step_kl is not None
    assert list(world.engine.adapters) == ["policy-v1"]
    assert await world.state(0) is VersionState.RETIRED


@pytest.mark.parametrize("world", [{"max_step_kl": 1e-9, "max_base_kl": 10.0}, {"max_base_kl": 1e-9}], indirect=True)
async def test_a_step_beyond_a_kl_bound_is_rejected_and_the_old_version_serves(world: World) -> None:
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


async def test_what_a_pin_brings_back_is_not_unloaded_under_it(world: World) -> None:
    """An idle adapter is about to be unloaded when an operator pins its version."""
    first = await world.commit(sampled_by=0)
    await publish(world, first)
    async with world.serving.use(first):  # a running reply keeps the first one loaded
        second = await world.commit(sampled_by=first)
        await publish(world, second)
        swap = world.publisher._turn
        await swap.acquire()
    pinning = asyncio.create_task(world.publisher.pin(first))
    await asyncio.sleep(0.02)  # it waits for the swap at hand
    unloading = asyncio.create_task(world.publisher._retire_idle())
    await asyncio.sleep(0.02)  # and this waits behind it
    swap.release()
    await asyncio.gather(pinning, unloading)
    assert world.serving.current == first
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


async def test_what_a_crash_left_behind_the_serving_version_never_serves(world: World) -> None:
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


async def test_an_ema_teacher_is_loaded_beside_its_version_and_leaves_with_it(world: World) -> None:
    first = await world.commit(sampled_by=0, has_ema=True)
    world.publisher.wake()
    await until(lambda: _serves(world, first))
    assert {"ema-v1", "policy-v1"} <= set(world.engine.adapters)
    async with world.serving.use() as use:
        assert (use.lora_path, use.ema_path) == ("policy-v1", "ema-v1")
        second = await world.commit(sampled_by=first)  # its trainer keeps no teacher any more
        world.publisher.wake()
        await until(lambda: _serves(world, second))
        assert {"ema-v1", "policy-v1", "policy-v2"} <= set(world.engine.adapters), "a scoring call still uses them"
    async with world.serving.use() as use:
        assert (use.lora_path, use.ema_path) == ("policy-v2", "policy-v2")
    await until(lambda: _has(world, {"policy-v2"}))


async def test_an_engine_that_comes_back_empty_gets_the_teacher_again(world: World) -> None:
    number = await world.commit(sampled_by=0, has_ema=True)
    world.publisher.wake()
    await until(lambda: _serves(world, number))
    world.engine.adapters.clear()
    await world.publisher.restore()
    assert set(world.engine.adapters) == {"ema-v1", "policy-v1"}


async def _serves(world: World, number: int) -> bool:
    return world.serving.current == number


async def _has(world: World, names: set[str]) -> bool:
    return set(world.engine.adapters) == names


async def test_an_adapter_that_another_run_left_under_that_name_is_replaced(world: World, tmp_path: Path) -> None:
    """An attached engine outlives the server; what it has as `policy-v1` may be another data directory's."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_model.safetensors").write_bytes(b"other")
    await world.engine.load_adapter("policy-v1", tmp_path / "other")
    number = await world.commit(sampled_by=0)
    await publish(world, number)
    folders = await world.engine.adapter_folders()
    assert folders == {"policy-v1": str(world.folder / ((await world.ledger.version(number)).folder or ""))}


async def test_an_engine_that_lost_its_adapter_is_noticed_and_restored(world: World) -> None:
    assert await world.publisher.is_in_place()
    number = await world.commit(sampled_by=0)
    await publish(world, number)
    assert await world.publisher.is_in_place()
    world.engine.adapters.clear()  # it was restarted, and is well
    assert not await world.publisher.is_in_place()
    await world.publisher.restore()
    assert await world.publisher.is_in_place()


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


@pytest.mark.parametrize("world", [{"keep_versions": 2}], indirect=True)
async def test_what_is_remembered_of_versions_ends_with_their_weights(world: World) -> None:
    for number in range(1, 7):
        assert await world.commit(sampled_by=world.serving.current, has_ema=number == 2) == number
        await publish(world, number)

    async def is_pruned() -> bool:
        return len(await world.ledger.version_folders()) == 2

    await until(is_pruned)
    async with world.publisher._turn:  # the pruning is over
        assert set(world.publisher._ours) == {"policy-v5", "policy-v6"}
    assert set(world.serving._lora_paths) <= {0}

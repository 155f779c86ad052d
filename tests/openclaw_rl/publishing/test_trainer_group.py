"""A trainer sends weights to every engine of a pool at once; the engines are stubs over real HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engine_client import served
from versioned_chat import versioned_chat
from waiting import until

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.engines.pool_member import Weights
from openclaw_rl.errors import CommitRefused, EngineGone, EngineRefused
from openclaw_rl.proxy.generation import Sampled
from openclaw_rl.publishing.engine_weights import PolicyEngine, RemoteOnlyWeights
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.testing import FakeEngine
from openclaw_rl.testing.fake_engine import Pacing
from openclaw_rl.types import Version, VersionState, WeightKind


class World:
    """Engines, the pool of them, and the policy that a trainer sends to."""

    def __init__(self, engines: list[FakeEngine], pool: PooledEngine, folder: Path) -> None:
        self.engines, self.pool, self.serving = engines, pool, VersionAdmission(hold_s=120)
        settings = PublisherSettings(unbroken_drain_s=0.0, call_timeout_s=120)
        self.policy = PolicyEngine(pool, self.serving, settings, folder, base_folder=folder / "base")

    async def send(self, number: int, *, reaches: int | None = None) -> None:
        """Send a version, as slime's ranks do; only to the first engines if `reaches` says so."""

        async def transfer() -> None:
            assert not self.serving.is_open
            for engine in self.engines[:reaches]:
                assert engine.running == 0
                engine.weight_version = number

        await self.policy.receive(number, transfer)

    async def chat(self, number: int, tokens: int = 3) -> Sampled:
        return await versioned_chat(self.pool, self.serving, self.engines[0].policy, number, tokens)

    @property
    def are_in(self) -> list[bool]:
        return [status.is_in for status in self.pool.statuses()]


def version(number: int, *, durable: bool = False) -> Version:
    folder = f"versions/full-{number}" if number else None
    made = Version(number, None, WeightKind.FULL, "base", folder, None, VersionState.SERVING)
    return replace(made, durable=durable or not number)


async def find(number: int) -> Version:
    return version(number)


@asynccontextmanager
async def pooled(folder: Path, count: int = 2, *, down: int = 0) -> AsyncIterator[World]:
    """down: number of engines that have not answered yet."""
    engines = [FakeEngine(pacing=Pacing(tokens_per_s=2000)) for _ in range(count)]
    for engine in engines[count - down :]:
        engine.go_down()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(engine)) for engine in engines]
        pool = PooledEngine(clients, change_s=60, is_full=True, poll_s=0.01)
        assert await pool.fault() is None
        watch = asyncio.create_task(pool.run())
        try:
            world = World(engines, pool, folder)
            await world.policy.restore(version(0), find)
            yield world
            assert not watch.done(), watch
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with pooled(tmp_path) as world:
        yield world


async def test_a_transfer_reaches_every_engine_and_cut_replies_go_on_under_the_new_version(world: World) -> None:
    assert world.policy.meet(False) == [engine.url for engine in world.pool.ready()]
    name = world.policy.name
    for engine in world.engines:
        engine.pacing.tokens_per_s = 5
    chats = [asyncio.create_task(world.chat(n, tokens=30)) for n in range(4)]
    await until(lambda: sum(engine.running for engine in world.engines) == 4)
    await asyncio.sleep(0.3)  # a token of each; the rest would take six seconds
    await world.send(1)
    for engine in world.engines:
        engine.pacing.tokens_per_s = 2000
    for sampled in await asyncio.gather(*chats):
        assert sampled.runs[-1][0] == 1
    assert world.are_in == [True, True]
    assert (await world.chat(9)).runs == [[1, 3]]
    assert world.policy.name == name, "the trainer goes on"


async def test_an_engine_that_missed_a_transfer_serves_nobody_and_the_trainer_starts_again(world: World) -> None:
    world.policy.meet(False)
    name = world.policy.name
    await world.send(1, reaches=1)
    assert world.are_in == [True, False]
    for n in range(4):
        assert (await world.chat(n)).runs == [[1, 3]]
    assert world.engines[1].weight_version == 0
    assert world.policy.name != name
    with pytest.raises(CommitRefused, match="meet them anew"):
        await world.send(2)
    assert world.serving.is_open, "no chat was held for it"


async def test_an_engine_that_dies_keeps_transfers_out_and_comes_back_by_the_checkpoint(world: World) -> None:
    world.policy.meet(False)
    name = world.policy.name
    await world.send(1)
    two = world.engines[1]
    two.go_down()
    await until(lambda: world.are_in == [True, False])
    with pytest.raises(CommitRefused, match="is away, and takes part in each transfer"):
        await world.send(2)
    assert world.policy.name == name, "it may come back: a driver that started now would start twice"
    assert (await world.chat(1)).runs == [[1, 3]]
    two.weight_version = 0  # another process
    two.come_up()
    await until(lambda: world.pool.every[1].starts == 1)
    await until(lambda: "only the trainer has version 1" in world.pool.every[1].fault)
    assert world.policy.name != name, "the trainer saves and starts again"
    await world.policy.note_files(version(1))
    assert world.are_in == [True, False]
    await world.policy.note_files(version(1, durable=True))
    await until(lambda: world.are_in == [True, True])
    assert two.weight_version == 1
    assert len(world.policy.meet(False) or []) == 2
    await world.send(2)
    assert [engine.weight_version for engine in world.engines] == [2, 2]


async def test_engines_that_all_died_take_an_older_version_once_the_newest_is_lost(world: World) -> None:
    world.policy.meet(False)
    await world.send(2)
    for engine in world.engines:
        engine.go_down()
    await until(lambda: world.are_in == [False, False])
    world.serving.hold()
    for engine in world.engines:
        engine.weight_version = 0
        engine.come_up()
    await until(lambda: all("only the trainer has version 2" in member.fault for member in world.pool.every))
    with pytest.raises(EngineGone):
        await world.policy.serve(version(1, durable=True))  # the driver died too, and version 2 with it
    await until(lambda: world.are_in == [True, True])
    await world.policy.restore(version(1, durable=True), find)
    world.serving.release_hold()
    assert (await world.chat(1)).runs == [[1, 3]]


async def test_after_a_torn_transfer_every_engine_takes_the_version_that_serves(world: World) -> None:
    world.policy.meet(False)
    await world.send(1)

    async def torn() -> None:
        world.engines[0].weight_version = 2  # and half of its tensors
        raise EngineGone("NCCL")

    with pytest.raises(EngineGone, match="NCCL"):
        await world.policy.receive(2, torn)
    assert not world.serving.is_open
    with pytest.raises(RemoteOnlyWeights):
        await world.policy.restore(version(1), find)
    await world.policy.restore(version(1, durable=True), find)
    world.serving.release_hold()
    await until(lambda: world.are_in == [True, True])  # the torn one may have left the pool
    assert [engine.weight_version for engine in world.engines] == [1, 1]
    assert [member.is_unsure for member in world.pool.every] == [False, False]


async def test_a_drained_engine_takes_no_part_and_ends_the_group(world: World) -> None:
    world.policy.meet(False)
    name, member = world.policy.name, world.pool.every[1]
    member.is_drained = member.is_told = True
    member.leave("drained")
    assert world.policy.name != name
    await until(lambda: member.answers)
    assert world.policy.meet(False) == [world.pool.url]
    await world.send(1, reaches=1)
    assert world.engines[1].weight_version == 0


async def test_an_engine_that_is_away_for_long_is_waited_for_no_longer(world: World) -> None:
    world.policy.meet(False)
    group = world.policy._group
    assert group is not None
    name = world.policy.name
    world.engines[1].go_down()
    await until(lambda: world.are_in == [True, False])
    assert world.policy.name == name
    group._away_s = 0.0
    assert world.policy.name != name
    assert world.policy.meet(False) == [world.pool.url]
    await world.send(1, reaches=1)
    assert (await world.chat(1)).runs == [[1, 3]]


async def test_no_engine_answers(world: World) -> None:
    for engine in world.engines:
        engine.go_down()
    await until(lambda: world.are_in == [False, False])
    with pytest.raises(EngineGone, match="no engine of the pool answers"):
        world.policy.meet(False)


async def test_weights_that_a_trainer_wrote_roll_through_the_pool_and_hold_nobody(world: World) -> None:
    world.policy.meet(True)
    name, place = world.policy.name, "push/0d51e72f/weight_v000001"
    (world.policy.data_dir / place).mkdir(parents=True)
    held: list[float] = []
    hold = world.serving.hold
    world.serving.hold = lambda *given: held.append(1) or hold(*given)  # type: ignore[method-assign,func-returns-value]
    await world.policy.take(version(1), place)
    assert held == []
    assert [engine.weight_version for engine in world.engines] == [1, 1]
    two = world.engines[1]
    two.go_down()
    await until(lambda: world.are_in == [True, False])
    two.weight_version = 0
    two.come_up()
    await until(lambda: world.are_in == [True, True])
    assert two.weight_version == 1, "from the folder: the version is in no checkpoint"
    assert world.policy.name == name, "its trainer goes on"
    await world.policy.note_files(version(1))
    assert (world.policy.data_dir / place).is_dir()


async def test_a_second_try_of_a_version_leaves_the_folder_of_the_first_one_until_it_serves(world: World) -> None:
    world.policy.meet(True)
    first, second = [f"push/{run}/weight_v000001" for run in ("0d51e72f", "deadbeef")]
    for name in (first, second):
        (world.policy.data_dir / name).mkdir(parents=True)
    await world.policy.take(version(1), first)
    one = world.engines[0]
    update = one.update_weights

    async def refuse(folder: Path, weight_version: int) -> None:
        raise EngineRefused("half a folder", status=400)

    one.update_weights = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineRefused):
        await world.policy.take(version(1), second)
    await world.policy.note_files(version(1))
    assert world.pool.weights == Weights(world.policy.data_dir / first, 1)
    assert (world.policy.data_dir / first).is_dir()
    assert not (world.policy.data_dir / second).exists()
    one.update_weights = update  # type: ignore[method-assign]
    (world.policy.data_dir / second).mkdir(parents=True)
    await world.policy.take(version(1), second)
    await world.policy.note_files(version(1))
    assert world.pool.weights == Weights(world.policy.data_dir / second, 1)
    assert [(world.policy.data_dir / name).exists() for name in (first, second)] == [False, True]


async def test_no_folder_is_deleted_while_an_engine_comes_in(world: World) -> None:
    world.policy.meet(True)
    name = "push/0d51e72f/weight_v000001"
    (world.policy.data_dir / name).mkdir(parents=True)
    async with world.pool.rolling():
        dropping = asyncio.create_task(world.policy.note_files(version(2, durable=True)))
        await asyncio.sleep(0.1)
        assert (world.policy.data_dir / name).is_dir()
    await dropping
    assert not (world.policy.data_dir / name).exists()


async def test_an_engine_that_answers_and_cannot_join_stops_training_for_a_while_alone(world: World) -> None:
    world.policy.meet(False)
    group, two = world.policy._group, world.engines[1]
    assert group is not None
    await world.send(1)
    two.go_down()
    await until(lambda: world.are_in == [True, False])
    update = two.update_weights

    async def refuse(folder: Path, weight_version: int) -> None:
        raise EngineRefused("its card is full", status=400)

    two.update_weights = refuse  # type: ignore[method-assign]
    two.weight_version = 0  # another process
    name = world.policy.name
    two.come_up()
    await until(lambda: "only the trainer has version 1" in world.pool.every[1].fault)
    assert world.policy.name != name, "the trainer writes its checkpoint for it, once"
    await world.policy.note_files(version(1, durable=True))
    await until(lambda: "its card is full" in world.pool.every[1].fault)
    assert len(world.policy.meet(False) or []) == 2
    with pytest.raises(CommitRefused, match="is away"):
        await world.send(2)
    name, group._away_s = world.policy.name, 0.0
    assert world.policy.name != name
    group._away_s = 600.0
    assert world.policy.meet(False) == [world.pool.url], "it was waited for in vain"
    name = world.policy.name
    for number in (2, 3):
        await world.send(number, reaches=1)
        assert world.policy.name == name
    two.update_weights = update  # type: ignore[method-assign]
    await world.policy.note_files(version(3, durable=True))
    await until(lambda: world.are_in == [True, True])
    assert world.policy.name != name
    assert len(world.policy.meet(False) or []) == 2
    await world.send(4)
    assert [engine.weight_version for engine in world.engines] == [4, 4]


async def test_an_engine_that_dies_while_the_engines_are_emptied_begins_no_transfer(world: World) -> None:
    world.policy.meet(False)
    await world.send(1)
    abort_all = world.pool.abort_all

    async def die_in_it() -> None:
        world.engines[1].go_down()
        await abort_all()

    world.pool.abort_all = die_in_it  # type: ignore[method-assign]

    async def transfer() -> None:
        raise AssertionError("the trainer would wait for the dead engine")

    with pytest.raises(CommitRefused, match="is away"):
        await world.policy.receive(2, transfer)
    assert world.serving.is_open
    assert not world.policy._full.is_unsure
    assert not world.pool.every[0].is_unsure
    assert (await world.chat(1)).runs == [[1, 3]]


async def test_a_cold_start_waits_for_engines_that_have_not_answered_yet(tmp_path: Path) -> None:
    async with pooled(tmp_path, down=1) as world:
        with pytest.raises(EngineGone, match="has not answered since the server's start"):
            world.policy.meet(False)
        assert world.policy.meet(True) == [world.pool.url], "files need no group"
        group = world.policy._group
        assert group is not None
        group._away_s = 0.0
        assert world.policy.meet(False) == [world.pool.url]
        group._away_s = 600.0
        world.engines[1].come_up()
        await until(lambda: world.are_in == [True, True])
        assert len(world.policy.meet(False) or []) == 2

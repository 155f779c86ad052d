"""A trainer that sends full weights itself: the real ledger, publisher and routes over the fake engine."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pushing import PushWorld, pushing
from waiting import until

from openclaw_rl.engines.base import Score
from openclaw_rl.errors import LedgerError
from openclaw_rl.publishing.engine_weights import RemoteOnlyWeights
from openclaw_rl.types import VersionState


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[PushWorld]:
    async with pushing(tmp_path) as world:
        yield world


async def test_a_push_that_begins_after_its_trainer_waits_no_longer_holds_no_chat(world: PushWorld) -> None:
    """A gate that takes longer than the trainer's call."""
    number = await world.commit()
    world.pushes._begin_s = 0.05
    async with world.publisher._swap:
        await world.call("push/begin", {"weight_version": number}, status=503)
    async with asyncio.timeout(120):
        while world.pushes._now is not None:
            await asyncio.sleep(0.01)
    assert world.serving.is_open
    world.pushes._begin_s = 120.0
    await world.push(number)
    assert await world.state(number) is VersionState.SERVING


async def test_a_version_that_only_its_trainer_has_waits_for_its_push(world: PushWorld) -> None:
    assert not (await world.call("tip"))["wants_push"]
    number = await world.commit(probe_error=0.0)
    assert (await world.call("tip"))["wants_push"]
    assert await world.state(number) is VersionState.CANDIDATE  # nobody looks for a folder that is not there
    await world.push(number)
    assert await world.state(number) is VersionState.SERVING
    assert (world.serving.current, world.serving.is_open) == (number, True)
    assert not (await world.call("tip"))["wants_push"]


async def test_chats_under_a_push_are_cut_and_go_on_token_by_token_exact(world: PushWorld) -> None:
    chats = [asyncio.create_task(world.chat(n)) for n in range(6)]
    await until(lambda: world.engine.running == 6)
    await asyncio.sleep(0.15)  # a token of each; 59 more would take six seconds
    await world.push(await world.commit())
    world.engine.pacing.tokens_per_s = 2000
    for sampled in await asyncio.gather(*chats):
        assert [version for version, _ in sampled.runs] == [0, 1]
        assert sum(length for _, length in sampled.runs) == 60


async def test_a_trainer_that_dies_in_a_push_leaves_the_gate_shut_until_what_serves_is_restored(
    world: PushWorld,
) -> None:
    number = await world.commit()
    await world.call("push/begin", {"weight_version": number, "deadline_s": 2})
    world.engine.weight_version = number  # half of it, and nobody will ever say that it is all
    assert not world.serving.is_open
    await until(lambda: world.serving.is_open)  # by `EngineReadiness`, from the base's folder
    assert (world.engine.weight_version, world.serving.current) == (0, 0)
    await world.call("push/end", {"weight_version": number}, status=409)
    assert (await world.call("tip"))["wants_push"]
    await world.push(number)
    assert await world.state(number) is VersionState.SERVING


async def test_a_trainer_that_died_in_a_push_ends_it_when_it_starts_again(world: PushWorld) -> None:
    number = await world.commit()
    await world.call("push/begin", {"weight_version": number, "deadline_s": 600})
    started = await world.call("start", {"trainer": "node"})
    await until(lambda: world.serving.is_open and world.serving.current == number + 1)
    assert await world.state(number) is VersionState.LOST
    assert started["tip"]["folder"] is None


async def test_a_trainer_that_died_before_its_push_began_holds_no_chat(world: PushWorld) -> None:
    """Its next start does not lose this version, which is on disk: the push would wait for a transfer of nobody."""
    number = await world.commit(durable=True)
    body = {"weight_version": number, "deadline_s": 600}
    async with world.publisher._swap:  # as a gate that takes long
        dead = asyncio.create_task(world.call("push/begin", body, status=503))
        await until(lambda: world.pushes._now is not None)
        other = asyncio.create_task(world.call("push/begin", body | {"weight_version": number + 1}, status=503))
        await until(lambda: not world.pushes._waiting.empty())
        await world.call("start", {"trainer": "node", "whole_fences": []})
    assert "started" in str(await asyncio.gather(dead, other))
    await until(lambda: world.pushes._now is None and world.pushes._waiting.empty())
    assert world.serving.is_open
    await world.push(number)
    assert await world.state(number) is VersionState.SERVING


async def test_a_begin_that_is_repeated_while_the_first_waits_begins_the_second_alone(world: PushWorld) -> None:
    number = await world.commit()
    async with world.publisher._swap:
        first = asyncio.create_task(world.call("push/begin", {"weight_version": number, "deadline_s": 600}, status=503))
        await until(lambda: world.pushes._now is not None)
        second = asyncio.create_task(world.push(number))
        await until(lambda: not world.pushes._waiting.empty())
    await asyncio.gather(first, second)
    assert await world.state(number) is VersionState.SERVING


async def test_a_push_whose_begin_was_not_answered_is_begun_anew_at_once(world: PushWorld) -> None:
    """The trainer repeats the call, and the first push would hold the chats until its deadline."""
    number = await world.commit()
    await world.call("push/begin", {"weight_version": number, "deadline_s": 600})
    async with asyncio.timeout(60):
        await world.push(number)
    assert await world.state(number) is VersionState.SERVING
    await until(lambda: world.serving.is_open)


async def test_a_failed_push_says_so_at_both_ends(world: PushWorld) -> None:
    number = await world.commit()
    await world.call("push/begin", {"weight_version": number})
    await world.call("push/end", {"weight_version": number, "failure": "NCCL"}, status=503)
    await until(lambda: world.serving.is_open)
    assert world.serving.current == 0


async def test_an_engine_that_starts_again_waits_for_the_trainer_that_has_the_weights(world: PushWorld) -> None:
    number = await world.commit()
    await world.push(number)
    engine = (await world.call("tip"))["engine"]
    world.engine.weight_version = 0  # it was restarted: the base
    with pytest.raises(RemoteOnlyWeights, match="only its trainer has it"):
        await world.publisher.restore()
    assert not world.serving.is_open
    tip = await world.call("tip")
    assert tip["wants_push"]
    assert tip["engine"] != engine
    await world.push(number)
    await until(lambda: world.serving.is_open)
    assert world.serving.current == number
    assert (await world.call("tip"))["engine"] == tip["engine"]


async def test_an_engine_that_started_again_before_anyone_looked_is_met_anew(world: PushWorld) -> None:
    """A push on the old one's way would wait for its deadline, with every chat held."""
    world.readiness._poll_s = 600  # the trainer is faster
    first = await world.commit()
    await world.push(first)
    engine = (await world.call("tip"))["engine"]
    number = await world.commit()
    world.engine.weight_version = 0
    assert "meet it anew" in str(await world.call("push/begin", {"weight_version": number}, status=409))
    assert not world.serving.is_open
    tip = await world.call("tip")
    assert tip["wants_push"]
    assert tip["engine"] != engine
    await world.push(number)
    assert (world.engine.weight_version, world.serving.current) == (number, number)
    assert (await world.call("tip"))["engine"] == tip["engine"]


async def test_a_trainer_that_starts_again_loses_what_was_not_durable(world: PushWorld) -> None:
    first = await world.commit()
    await world.push(first)
    await world.call("durable", {"weight_version": first})
    lost = await world.commit()
    await world.push(lost)
    started = await world.call("start", {"trainer": "node"})
    tip = started["tip"]
    assert tip["weight_version"] == lost + 1
    assert tip["folder"] == "versions/full-1"  # what it loads: the durable one
    assert await world.state(lost) is VersionState.LOST
    await until(lambda: world.serving.current == lost + 1)  # from its folder, without the trainer
    assert (await world.ledger.counts())["sampled"] == 1  # the lost version's sample waits again


async def test_a_trainer_that_starts_again_keeps_what_it_holds_whole(world: PushWorld) -> None:
    kept = await world.commit()
    fence = (await world.ledger.version(kept)).lease_id.split("-")[1]  # type: ignore[union-attr]
    lost = await world.commit()
    started = await world.call("start", {"trainer": "node", "whole_fences": [int(fence)]})
    assert (started["tip"]["weight_version"], started["tip"]["folder"]) == (lost + 1, f"versions/full-{kept}")
    assert (await world.ledger.version(kept)).durable
    assert await world.state(lost) is VersionState.LOST


async def test_what_serves_is_pinned_where_it_is_and_no_version_without_weights_is(world: PushWorld) -> None:
    first = await world.commit()
    await world.push(first)
    second = await world.commit()
    await world.push(second)
    await world.publisher.pin(second)  # its trainer alone has the weights, and the engine
    assert (await world.ledger.pinned(), await world.ledger.serving_version()) == (second, second)
    await world.publisher.pin(None)
    with pytest.raises(LedgerError, match=f"version {first} was never checkpointed: only its trainer has the weights"):
        await world.publisher.pin(first)
    assert (await world.ledger.pinned(), await world.ledger.serving_version()) == (None, second)
    assert (world.serving.current, world.engine.weight_version) == (second, second)


async def test_weights_that_are_not_the_trainers_are_refused_and_what_served_is_restored(world: PushWorld) -> None:
    number = await world.commit(probe_error=0.5)
    await world.call("push/begin", {"weight_version": number})
    world.engine.weight_version = number
    await world.call("push/end", {"weight_version": number}, status=409)
    assert await world.state(number) is VersionState.REJECTED
    await until(lambda: world.serving.is_open)
    assert (world.engine.weight_version, world.serving.current) == (0, 0)


async def test_an_engine_without_numbers_takes_no_weights_and_costs_none(world: PushWorld) -> None:
    """The push overwrites its weights: afterwards no test could tell the engine's fault from the version's."""
    number = await world.commit(probe_error=0.0)
    score = world.engine.score

    async def mute(*args: Any, **kwargs: Any) -> Score:
        return replace(said := await score(*args, **kwargs), log_probs=(math.nan,) * len(said.log_probs))

    world.engine.score = mute  # type: ignore[method-assign]
    await world.call("push/begin", {"weight_version": number}, status=503)
    assert world.serving.is_open
    assert (await world.call("tip"))["wants_push"]
    world.engine.score = score  # type: ignore[method-assign]
    await world.push(number)
    assert await world.state(number) is VersionState.SERVING


async def test_what_is_not_the_tip_or_was_not_begun_is_refused(world: PushWorld) -> None:
    await world.commit()
    await world.call("push/end", {"weight_version": 1}, status=409)
    await world.call("push/begin", {"weight_version": 0}, status=409)
    await world.ledger.set_pin(0)
    assert not (await world.call("tip"))["wants_push"]
    await world.call("push/begin", {"weight_version": 1}, status=409)
    assert world.serving.is_open


async def begin_files(world: PushWorld, number: int) -> str:
    """Begin a push and write the folder that slime would; return its name."""
    place = f"push/0d51e72f/weight_v{number:06d}"
    await world.call("push/begin", {"weight_version": number, "folder": place, "deadline_s": 600})
    # Not before: the server deletes a folder that no trainer writes.
    (world.folder / place).mkdir(parents=True, exist_ok=True)
    return place


async def push_files(world: PushWorld, number: int, *, status: int = 200) -> Path:
    place = await begin_files(world, number)
    assert world.serving.is_open, "no chat waits for the files"
    await world.call("push/end", {"weight_version": number}, status=status)
    return world.folder / place


async def test_weights_in_a_folder_are_given_to_the_engine_by_the_server(world: PushWorld) -> None:
    await world.call("start", {"trainer": "node", "writes_files": True})
    first = await push_files(world, await world.commit(probe_error=0.0))
    assert (world.engine.weight_version, world.serving.current) == (1, 1)
    second = await push_files(world, await world.commit(probe_error=0.0))
    assert (world.engine.weight_version, world.serving.current) == (2, 2)
    await until(lambda: not first.exists())
    assert second.is_dir()
    engine = (await world.call("tip"))["engine"]
    world.engine.weight_version = 0  # it was started again
    await world.publisher.restore()
    assert world.engine.weight_version == 2
    assert (await world.call("tip"))["engine"] == engine, "its trainer goes on"


async def test_weights_in_a_folder_that_fail_their_test_leave_the_version_from_before(tmp_path: Path) -> None:
    async with pushing(tmp_path, gate={"max_step_kl": 1e-6}) as world:
        await world.call("start", {"trainer": "node", "writes_files": True})
        number = await world.commit(probe_error=0.0)
        untrusted: list[int] = []
        world.pushes._policy.mark_untrusted = lambda: untrusted.append(1)  # type: ignore[method-assign]
        await push_files(world, number, status=409)
        assert await world.state(number) is VersionState.REJECTED
        assert (world.engine.weight_version, world.serving.current, world.serving.is_open) == (0, 0, True)
        assert untrusted == [], "the weights from before were given back at once"


@pytest.mark.parametrize("folder", ["push/0d51e72f/not-there", "versions", "push/../keys"])
async def test_only_a_folder_of_the_pushes_is_taken(world: PushWorld, folder: str) -> None:
    for name in ("versions", "keys", "push/0d51e72f"):
        (world.folder / name).mkdir(parents=True, exist_ok=True)
    number = await world.commit()
    await world.call("push/begin", {"weight_version": number, "folder": folder})
    await world.call("push/end", {"weight_version": number}, status=409)
    assert (world.engine.weight_version, world.serving.is_open) == (0, True)


async def test_a_pin_a_rollback_and_an_engine_that_is_back_wait_for_no_file(world: PushWorld) -> None:
    await world.call("start", {"trainer": "node", "writes_files": True})
    await push_files(world, await world.commit(probe_error=0.0))
    number = await world.commit(probe_error=0.0)
    place = await begin_files(world, number)
    world.engine.weight_version = 0  # it was started again
    async with asyncio.timeout(60):
        await world.publisher.restore()
        await until(lambda: world.serving.is_open)  # the poll may have seen the restart too, and held the chats
        assert world.engine.weight_version == 1
        await world.publisher.pin(1)
        await world.publisher._reconcile()
    assert (world.folder / place).is_dir(), "its trainer is writing it"
    said = await world.call("push/end", {"weight_version": number}, status=409)
    assert "version 1 is pinned" in str(said)
    assert (world.engine.weight_version, world.serving.current, world.serving.is_open) == (1, 1, True)
    await world.publisher.pin(None)
    await push_files(world, number)
    assert (world.engine.weight_version, world.serving.current) == (2, 2)


async def test_files_of_a_version_that_was_rolled_back_meanwhile_are_not_taken(world: PushWorld) -> None:
    await world.call("start", {"trainer": "node", "writes_files": True})
    number = await world.commit(probe_error=0.0)
    await begin_files(world, number)
    await world.ledger.rollback(0, requeue=True)
    await world.call("push/end", {"weight_version": number}, status=409)
    assert (world.engine.weight_version, world.serving.is_open) == (0, True)

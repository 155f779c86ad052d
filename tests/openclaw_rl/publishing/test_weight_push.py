"""A trainer that sends full weights itself: the real ledger, publisher and routes over the fake engine."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI
from ledger import FULL_IDENTITY, commit_of, give_sample, probe_of
from turns import make_request, make_turn
from waiting import until

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.base import Score
from openclaw_rl.errors import EngineError, LedgerError
from openclaw_rl.ledger import Ledger
from openclaw_rl.methods.binary_rl import BinarySettings
from openclaw_rl.proxy.generation import Decoding, EngineExtras, Generation, Sampled
from openclaw_rl.publishing.engine_weights import PolicyEngine, RemoteOnlyWeights
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.server.api.trainer import LeaseWait, build_push_router, build_trainer_router
from openclaw_rl.server.engine_readiness import EngineReadiness
from openclaw_rl.settings import PublisherSettings, TrainerSettings, TrainingSettings
from openclaw_rl.testing import FakeEngine
from openclaw_rl.testing.fake_engine import BASE_SEED, Pacing
from openclaw_rl.trainer_protocol import LeaseBody, Start, Started
from openclaw_rl.types import SamplingParams, VersionState, WeightKind

PROMPT, REPLY = (1, 5, 6), (11, 12, 13)
TOKEN = "secret-token"
FULL = WeightKind.FULL


class World:
    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self.ledger, self.engine, self.serving = (
            ledger,
            FakeEngine(pacing=Pacing(tokens_per_s=10)),
            VersionAdmission(120),
        )
        settings = PublisherSettings(call_timeout_s=120, unbroken_drain_s=0)
        policy = PolicyEngine(self.engine, self.serving, settings, folder, base_folder=folder / "base")
        self.publisher = Publisher(ledger, policy, settings)
        self.pushes = self.publisher.pushes
        self.readiness = EngineReadiness(
            self.engine, self.serving, self.publisher.restore, is_in_place=self.publisher.is_in_place, poll_s=0.02
        )

        async def on_start(start: Start) -> Started:
            self.pushes.give_up("started")
            await ledger.revoke(trainer=start.trainer, reason="started")
            await ledger.lose_undurable("started", whole_fences=start.whole_fences)
            self.publisher.wake()
            return Started(
                tip=await ledger.tip(), engine_url="http://e", trainer=TrainerSettings(), method=BinarySettings()
            )

        app = FastAPI()
        router = build_trainer_router(
            ledger,
            token=TOKEN,
            lease_wait=LeaseWait(),
            on_commit=lambda _: self.publisher.wake(),
            describe=self.pushes.describe,
        )
        app.include_router(router)
        app.include_router(build_push_router(ledger, token=TOKEN, pushes=self.pushes, on_start=on_start))

        @app.exception_handler(EngineError)
        async def engine_error(_: Any, error: EngineError) -> Any:
            from fastapi.responses import JSONResponse

            return JSONResponse({"error": {"message": str(error)}}, 503)

        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://t", headers={"authorization": f"Bearer {TOKEN}"}
        )

    async def call(self, verb: str, body: Any = None, *, status: int = 200) -> Any:
        answer = await self.http.post(f"/v1/trainer/{verb}", json=body or {})
        assert answer.status_code == status, answer.text
        return answer.json()

    async def sampled(self) -> str:
        name = f"turn-{uuid4().hex}"
        version = (await self.ledger.tip()).weight_version
        request = make_request(name, prompt=PROMPT)
        return await give_sample(self.ledger, request, make_turn(name, ids=REPLY, version=version))

    async def commit(self, *, probe_error: float | None = None, durable: bool = False) -> int:
        await self.sampled()
        lease = (await self.call("lease", {"trainer": "node", "wait_s": 0}))["lease"]
        again = (await self.call("leased", {"fence": lease["fence"]}))["lease"]
        assert again == lease
        number = (await self.ledger.versions())[-1].weight_version + 1
        probes = []
        if probe_error is not None:
            seed = BASE_SEED ^ number
            true = self.engine.policy.log_probs((*PROMPT, *REPLY), len(PROMPT), seed)
            probes = [probe_of(PROMPT, REPLY, true, error=probe_error, parent_error=probe_error)]
        folder = f"versions/full-{number}"
        body = commit_of(LeaseBody.model_validate(lease), folder, kind=FULL, probes=probes, durable=durable)
        done = await self.call("commit", body.model_dump(mode="json"))
        assert done["weight_version"] == number
        return number

    async def push(self, number: int) -> None:
        await self.call("push/begin", {"weight_version": number})
        assert self.engine.running == 0
        self.engine.weight_version = number
        await self.call("push/end", {"weight_version": number})

    async def state(self, number: int) -> VersionState:
        return (await self.ledger.version(number)).state

    async def chat(self, number: int) -> Sampled:
        running = Generation(
            self.engine,
            self.serving,
            rid=f"r{number}",
            prompt_ids=(*PROMPT, 7 + number),
            decoding=Decoding(SamplingParams(max_new_tokens=60), (), EngineExtras(ignore_eos=True)),
        )
        async with running, aclosing(running.events()) as events:
            async for _ in events:
                pass
        return running.sampled


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    training = TrainingSettings(min_batch=1, batch_size=1)
    ledger = await Ledger.open(tmp_path / "ledger.sqlite3", identity=FULL_IDENTITY, training=training)
    world = World(ledger, tmp_path)
    await world.publisher.restore()
    tasks = [asyncio.create_task(part.run()) for part in (world.publisher, world.pushes, world.readiness)]
    yield world
    assert not any(task.done() for task in tasks), tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await ledger.audit() == []
    await world.http.aclose()
    await ledger.aclose()


async def test_a_push_that_begins_after_its_trainer_waits_no_longer_holds_no_chat(world: World) -> None:
    """A gate that takes longer than the trainer's call."""
    number = await world.commit()
    world.pushes._begin_s = 0.05
    async with world.publisher._swap:
        await world.call("push/begin", {"weight_version": number}, status=503)
    async with asyncio.timeout(10):
        while world.pushes._now is not None:
            await asyncio.sleep(0.01)
    assert world.serving.is_open
    world.pushes._begin_s = 10.0
    await world.push(number)
    assert await world.state(number) is VersionState.SERVING


async def test_a_version_that_only_its_trainer_has_waits_for_its_push(world: World) -> None:
    assert not (await world.call("tip"))["wants_push"]
    number = await world.commit(probe_error=0.0)
    assert (await world.call("tip"))["wants_push"]
    assert await world.state(number) is VersionState.CANDIDATE  # nobody looks for a folder that is not there
    await world.push(number)
    assert await world.state(number) is VersionState.SERVING
    assert (world.serving.current, world.serving.is_open) == (number, True)
    assert not (await world.call("tip"))["wants_push"]


async def test_chats_under_a_push_are_cut_and_go_on_token_by_token_exact(world: World) -> None:
    chats = [asyncio.create_task(world.chat(n)) for n in range(6)]
    await until(lambda: world.engine.running == 6)
    await asyncio.sleep(0.15)  # a token of each; 59 more would take six seconds
    await world.push(await world.commit())
    world.engine.pacing.tokens_per_s = 2000
    for sampled in await asyncio.gather(*chats):
        assert [version for version, _ in sampled.runs] == [0, 1]
        assert sum(length for _, length in sampled.runs) == 60


async def test_a_trainer_that_dies_in_a_push_leaves_the_gate_shut_until_what_serves_is_restored(world: World) -> None:
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


async def test_a_trainer_that_died_in_a_push_ends_it_when_it_starts_again(world: World) -> None:
    number = await world.commit()
    await world.call("push/begin", {"weight_version": number, "deadline_s": 600})
    started = await world.call("start", {"trainer": "node"})
    await until(lambda: world.serving.is_open and world.serving.current == number + 1)
    assert await world.state(number) is VersionState.LOST
    assert started["tip"]["folder"] is None


async def test_a_push_whose_begin_was_not_answered_is_begun_anew_at_once(world: World) -> None:
    """The trainer repeats the call, and the first push would hold the chats until its deadline."""
    number = await world.commit()
    await world.call("push/begin", {"weight_version": number, "deadline_s": 600})
    async with asyncio.timeout(60):
        await world.push(number)
    assert await world.state(number) is VersionState.SERVING
    await until(lambda: world.serving.is_open)


async def test_a_failed_push_says_so_at_both_ends(world: World) -> None:
    number = await world.commit()
    await world.call("push/begin", {"weight_version": number})
    await world.call("push/end", {"weight_version": number, "failure": "NCCL"}, status=503)
    await until(lambda: world.serving.is_open)
    assert world.serving.current == 0


async def test_an_engine_that_starts_again_waits_for_the_trainer_that_has_the_weights(world: World) -> None:
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


async def test_an_engine_that_started_again_before_anyone_looked_is_met_anew(world: World) -> None:
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


async def test_a_trainer_that_starts_again_loses_what_was_not_durable(world: World) -> None:
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


async def test_a_trainer_that_starts_again_keeps_what_it_holds_whole(world: World) -> None:
    kept = await world.commit()
    fence = (await world.ledger.version(kept)).lease_id.split("-")[1]  # type: ignore[union-attr]
    lost = await world.commit()
    started = await world.call("start", {"trainer": "node", "whole_fences": [int(fence)]})
    assert (started["tip"]["weight_version"], started["tip"]["folder"]) == (lost + 1, f"versions/full-{kept}")
    assert (await world.ledger.version(kept)).durable
    assert await world.state(lost) is VersionState.LOST


async def test_what_serves_is_pinned_where_it_is_and_no_version_without_weights_is(world: World) -> None:
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


async def test_weights_that_are_not_the_trainers_are_refused_and_what_served_is_restored(world: World) -> None:
    number = await world.commit(probe_error=0.5)
    await world.call("push/begin", {"weight_version": number})
    world.engine.weight_version = number
    await world.call("push/end", {"weight_version": number}, status=409)
    assert await world.state(number) is VersionState.REJECTED
    await until(lambda: world.serving.is_open)
    assert (world.engine.weight_version, world.serving.current) == (0, 0)


async def test_an_engine_without_numbers_takes_no_weights_and_costs_none(world: World) -> None:
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


async def test_what_is_not_the_tip_or_was_not_begun_is_refused(world: World) -> None:
    await world.commit()
    await world.call("push/end", {"weight_version": 1}, status=409)
    await world.call("push/begin", {"weight_version": 0}, status=409)
    await world.ledger.set_pin(0)
    assert not (await world.call("tip"))["wants_push"]
    await world.call("push/begin", {"weight_version": 1}, status=409)
    assert world.serving.is_open

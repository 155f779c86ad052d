"""A trainer that sends full weights itself: the real ledger, publisher and routes over the fake engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from ledger import FULL_IDENTITY, commit_of, give_sample, probe_of
from turns import make_request, make_turn

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.errors import EngineError
from openclaw_rl.ledger import Ledger
from openclaw_rl.methods.binary_rl import BinarySettings
from openclaw_rl.proxy.generation import Decoding, EngineExtras, Generation, Sampled
from openclaw_rl.publishing.canary import Canary, ScoreBase
from openclaw_rl.publishing.engine_weights import PolicyEngine
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


class PushWorld:
    def __init__(
        self,
        ledger: Ledger,
        folder: Path,
        *,
        gate: dict[str, float] | None = None,
        canaries: Sequence[Canary] = (),
        score_base: ScoreBase | None = None,
    ) -> None:
        """gate: settings of the publisher."""
        self.folder = folder
        self.ledger, self.engine, self.serving = (
            ledger,
            FakeEngine(pacing=Pacing(tokens_per_s=10)),
            VersionAdmission(120),
        )
        settings = PublisherSettings(call_timeout_s=120, unbroken_drain_s=0, **(gate or {}))
        policy = PolicyEngine(self.engine, self.serving, settings, folder, base_folder=folder / "base")
        self.alerts: list[tuple[str, dict[str, object]]] = []

        def alert(event: str, **fields: object) -> None:
            self.alerts.append((event, fields))

        self.publisher = Publisher(ledger, policy, settings, canaries=canaries, score_base=score_base, alert=alert)
        self.pushes = self.publisher.pushes
        self.readiness = EngineReadiness(
            self.engine, self.serving, self.publisher.restore, is_in_place=self.publisher.is_in_place, poll_s=0.02
        )

        async def on_start(start: Start) -> Started:
            self.pushes.give_up("started")
            self.pushes.meet(start.writes_files)
            await ledger.revoke(trainer=start.trainer, reason="started")
            await ledger.lose_undurable("started", whole_fences=start.whole_fences)
            self.publisher.wake()
            return Started(
                tip=await ledger.tip(), engine_urls=["http://e"], trainer=TrainerSettings(), method=BinarySettings()
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
        return await self.commit_lease(lease, probe_error=probe_error, durable=durable)

    async def commit_lease(self, lease: Any, *, probe_error: float | None = None, durable: bool = False) -> int:
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

    async def push(self, number: int, *, status: int = 200) -> None:
        await self.call("push/begin", {"weight_version": number})
        assert self.engine.running == 0
        self.engine.weight_version = number
        await self.call("push/end", {"weight_version": number}, status=status)

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


@asynccontextmanager
async def pushing(folder: Path, **given: Any) -> AsyncIterator[PushWorld]:
    """Run the parts of the server that a push needs. given: of the world."""
    training = TrainingSettings(min_batch=1, batch_size=1)
    ledger = await Ledger.open(folder / "ledger.sqlite3", identity=FULL_IDENTITY, training=training)
    world = PushWorld(ledger, folder, **given)
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

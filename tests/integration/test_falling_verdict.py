"""The server rolls back from a wrong sign in a method's `score`, and never from the true sign.

Ledger, rules judge, Binary RL's score and advantages, publisher, gate and regression monitor are the product's own. The
engine is the fake one. The policy is one number θ a version: the log-odds of a reply that its user likes. A step moves
θ along the advantages, as a policy gradient would. `scripts/e2e/falling_verdict.py` does the same on the real engine,
model and trainer, in minutes.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.version_keys import adapter_name
from openclaw_rl.judge.rules import RulesJudge
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Dropped, ScoringTools
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.server.regression import RegressionMonitor, VerdictDrop
from openclaw_rl.settings import AlertSettings, PublisherSettings, TrainingSettings, WatchSettings
from openclaw_rl.telemetry.alerts import Alerts
from openclaw_rl.testing import FakeEngine
from openclaw_rl.trainer_protocol import Commit, Manifest, Probe, Report
from openclaw_rl.types import (
    NextState,
    Request,
    Sample,
    SamplingParams,
    Scope,
    Turn,
    TurnKey,
    VersionRun,
    VersionState,
    WeightKind,
)

PROMPT, LIKED, DISLIKED = (1, 5, 9), (11, 12, 13, 14), (21, 22, 23, 24)
BATCH, RATE, LOOK_EVERY = 8, 0.1, 4

Fault = Callable[[Sample], Sample]


def no_fault(sample: Sample) -> Sample:
    return sample


def wrong_sign(sample: Sample) -> Sample:
    assert sample.reward is not None
    return replace(sample, reward=-sample.reward)


@dataclass
class Simulation:
    ledger: Ledger
    engine: FakeEngine
    serving: VersionAdmission
    publisher: Publisher
    watch: RegressionMonitor
    folder: Path
    rng: random.Random
    theta: dict[int, float] = field(default_factory=lambda: {0: 0.6})
    baseline: dict[str, float] = field(default_factory=dict)
    said: Counter[int] = field(default_factory=Counter)
    turns: int = 0

    async def turn(self, fault: Fault) -> None:
        """Serve one chat turn, judge it by the rules, score it by Binary RL, and spoil the score on demand."""
        self.turns += 1
        turn_id, version = f"turn-{self.turns}", self.serving.current
        is_liked = self.rng.random() < 1 / (1 + math.exp(-self.theta[version]))
        reply = LIKED if is_liked else DISLIKED
        asked = (Message(role="user", content="Which bag is the right one?"),)
        scope = Scope("ann", "s")
        await self.ledger.begin(
            Request(turn_id, scope, 0.0, asked, None, None, PROMPT, SamplingParams(max_new_tokens=8))
        )
        seed = self.engine.adapters.get(adapter_name(version) or "", 0)
        log_probs = self.engine.policy.log_probs((*PROMPT, *reply), len(PROMPT), seed)
        runs, mask = (VersionRun(version, len(reply)),), (True,) * len(reply)
        answer = Message(role="assistant", content="The red one.")
        await self.ledger.finish(
            Turn(turn_id, turn_id, 0.0, reply, log_probs, mask, runs, "stop", answer), TurnKey("r", "b", turn_id)
        )
        says = "Thanks, perfect!" if is_liked else "No, that is wrong."
        await self.ledger.pair(turn_id, NextState((Message(role="user", content=says),)), by_request_id=turn_id)
        (judged,) = await self.ledger.to_judge(10)
        verdict = await RulesJudge().verdict(judged)
        assert verdict.value == (1 if is_liked else -1)
        self.said[verdict.value] += 1
        await self.ledger.record_verdict(turn_id, verdict)
        (judged,) = await self.ledger.to_score(10)
        sample = await METHOD.score(judged, ScoringTools())
        assert not isinstance(sample, Dropped)
        await self.ledger.record_sample(fault(sample))
        if self.turns % BATCH == 0:
            await self.step()

    async def chat(self, turns: int, fault: Fault) -> VerdictDrop | None:
        """Serve turns, with checks in between, until verdicts fall."""
        for _ in range(turns):
            await self.turn(fault)
            if self.turns % LOOK_EVERY == 0 and (fall := await self.watch.look()) is not None:
                return fall
        return None

    async def step(self) -> None:
        """Run a step of the trainer: θ ← θ + rate · Σ advantage · (±1 by the sampled kind)."""
        lease = await self.ledger.lease(trainer="toy", now=True)
        if lease is None:  # learning is paused
            return
        settings = BinarySettings(baseline="ema")
        theta = self.theta[lease.parent]
        for sample, credit in zip(
            lease.samples, METHOD.advantages(lease.samples, settings, self.baseline), strict=True
        ):
            theta += RATE * credit[0] * (1 if sample.response_ids == LIKED else -1)
        folder = self.folder / "versions" / lease.lease_id
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(lease.lease_id.encode())
        await self.engine.load_adapter("probe", folder)
        log_probs = list((await self.engine.score(PROMPT, LIKED, lora_path="probe", extra_key=None)).log_probs)
        await self.engine.unload_adapter("probe")
        probe = Probe(
            prompt_ids=list(PROMPT), response_ids=list(LIKED), log_probs=log_probs, parent_log_probs=log_probs
        )
        manifest = Manifest(folder=f"versions/{lease.lease_id}", kind=WeightKind.LORA, base_hash="base", sha256="x")
        number = await self.ledger.commit(
            Commit(
                lease_id=lease.lease_id,
                fence=lease.fence,
                parent=lease.parent,
                manifest=manifest,
                report=Report(metrics={"loss": 0.1}, probes=[probe]),
            )
        )
        self.theta[number] = theta
        self.publisher.wake()
        async with asyncio.timeout(120):
            while self.serving.current != number:
                await asyncio.sleep(0.002)


@asynccontextmanager
async def simulation(folder: Path, seed: int) -> AsyncIterator[Simulation]:
    training = TrainingSettings(batch_size=BATCH, min_batch=1, max_staleness=100)
    ledger = await Ledger.open(folder / "ledger.sqlite3", identity=Identity("base", "t", "tiny"), training=training)
    engine, serving = FakeEngine(), VersionAdmission(5.0)
    async with httpx.AsyncClient() as client:
        alerts = Alerts(AlertSettings(), client)
        settings = PublisherSettings(keep_versions=100)
        policy = PolicyEngine(engine, serving, settings, folder)
        publisher = Publisher(ledger, policy, settings, alert=alerts.raise_alert)
        await publisher.restore()
        task = asyncio.create_task(publisher.run())
        watch = RegressionMonitor(ledger, publisher, WatchSettings(), alerts)
        yield Simulation(ledger, engine, serving, publisher, watch, folder, random.Random(seed))
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await ledger.aclose()


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_wrong_sign_of_the_reward_is_gone_back_from_within_a_hundred_turns(tmp_path: Path, seed: int) -> None:
    async with simulation(tmp_path, seed=seed) as world:
        assert await world.chat(48, no_fault) is None
        healthy, before = world.serving.current, dict(world.said)
        fall = await world.chat(100, wrong_sign)
        assert fall is not None, f"no rollback: {world.said - Counter(before)}"
        # What serves is a version from before the damage, or from its first steps, and nothing was relabelled.
        assert world.serving.current == fall.good < max(world.theta)
        assert world.theta[fall.good] > world.theta[max(world.theta)] + 1.0
        assert fall.good <= healthy + 6
        assert await world.ledger.audit(is_deep=True) == []
        abandoned = [v for v in await world.ledger.versions() if v.weight_version > fall.good]
        assert {v.state for v in abandoned} == {VersionState.ROLLED_BACK}
        assert (await world.ledger.counts())["dropped.rolled_back"] == BATCH * len(abandoned)
        # The next batch builds on it.
        for _ in range(BATCH):
            await world.turn(no_fault)
        assert (await world.ledger.version(world.serving.current)).parent == fall.good


async def test_while_the_fault_stays_learning_is_paused(tmp_path: Path) -> None:
    async with simulation(tmp_path, seed=2) as world:
        assert await world.chat(200, wrong_sign) is not None
        assert await world.chat(200, wrong_sign) is not None
        assert world.watch.falls == WatchSettings().pause_after
        assert not await world.ledger.learning()


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_with_the_true_sign_nothing_is_ever_gone_back_from(tmp_path: Path, seed: int) -> None:
    async with simulation(tmp_path, seed) as world:
        assert await world.chat(200, no_fault) is None
        assert world.theta[world.serving.current] > world.theta[0] + 0.5  # it did learn


async def test_who_pins_a_version_decides_alone(tmp_path: Path) -> None:
    async with simulation(tmp_path, seed=1) as world:
        for _ in range(120):
            await world.turn(wrong_sign)
        await world.publisher.pin(world.serving.current)
        assert await world.watch.look() is None
        await world.publisher.pin(None)
        assert await world.watch.look() is not None

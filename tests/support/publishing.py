"""A real ledger, a fake engine and the publisher between them; what its tests wait for."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.version_keys import adapter_name
from openclaw_rl.ledger import Ledger
from openclaw_rl.messages import Message
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.testing import FakeEngine, ToyPolicy
from openclaw_rl.testing.toy_policy import BASE_SEED
from openclaw_rl.trainer_protocol import Commit, Manifest, Probe, Report
from openclaw_rl.types import (
    LogProbs,
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
        self.serving = VersionAdmission(120.0)
        self.health = Health()
        policy = PolicyEngine(engine, self.serving, settings, folder, base_folder=folder / "base", health=self.health)
        self.publisher = Publisher(ledger, policy, settings, health=self.health)
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
        weights: bytes | None = None,
        has_probe: bool = True,
    ) -> int:
        """One step: its adapter's bytes are its lease's name, or `weights`; its probe is what the engine will answer,
        less an error.
        """
        await self.sampled(sampled_by)
        lease = await self.ledger.lease(trainer="test", now=True)
        assert lease is not None
        folder = self.folder / "versions" / lease.lease_id
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(weights or lease.lease_id.encode())
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
        report = Report(metrics=metrics or {"loss": 0.1}, probes=[probe] if has_probe else [])
        body = Commit(lease_id=lease.lease_id, fence=lease.fence, parent=lease.parent, manifest=manifest, report=report)
        return await self.ledger.commit(body)

    async def commit_full(self, *, probe_error: float = 0.0, step: float = 0.1) -> int:
        """One step of full weights: its probe is what the engine will answer once they are pushed, less an error."""
        await self.sampled((await self.ledger.tip()).weight_version)
        lease = await self.ledger.lease(trainer="test", now=True)
        assert lease is not None
        log_probs = self.engine.policy.log_probs((*PROMPT, *REPLY), len(PROMPT), BASE_SEED ^ (lease.parent + 1))
        probe = Probe(
            prompt_ids=list(PROMPT),
            response_ids=list(REPLY),
            log_probs=[value + probe_error for value in log_probs],
            parent_log_probs=[value + step for value in log_probs],
        )
        folder = f"versions/{lease.lease_id}"
        (self.folder / folder).mkdir(parents=True)
        manifest = Manifest(folder=folder, kind=WeightKind.FULL, base_hash="base", sha256="x", weights_file="model")
        report = Report(metrics={"loss": 0.1}, probes=[probe])
        body = Commit(lease_id=lease.lease_id, fence=lease.fence, parent=lease.parent, manifest=manifest, report=report)
        return await self.ledger.commit(body)

    async def state(self, number: int) -> VersionState:
        return (await self.ledger.version(number)).state


@dataclass(frozen=True, slots=True)
class Speechless(ToyPolicy):
    """Has no numbers under these seeds."""

    seeds: frozenset[int] = frozenset()

    def log_probs(self, ids: Sequence[int], start: int, seed: int) -> LogProbs:
        said = ToyPolicy.log_probs(self, ids, start, seed)
        return (math.nan,) * len(said) if seed in self.seeds else said


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while not await condition():
            await asyncio.sleep(0.005)


async def ends(world: World, number: int, state: VersionState) -> None:
    async def is_there() -> bool:
        return await world.state(number) is state

    await until(is_there)


async def publish(world: World, number: int) -> None:
    world.publisher.wake()

    async def serves() -> bool:
        return await world.state(number) is VersionState.SERVING and world.serving.current == number

    await until(serves)


async def is_served(world: World, number: int) -> bool:
    return world.serving.current == number


async def holds(world: World, names: set[str]) -> bool:
    return set(world.engine.adapters) == names

"""A real ledger, a fake engine and the publisher between them; what its tests wait for."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ledger import commit_of, give_sample, probe_of
from turns import make_request, make_turn

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.version_keys import adapter_name
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.testing import FakeEngine, ToyPolicy
from openclaw_rl.testing.toy_policy import BASE_SEED
from openclaw_rl.types import LogProbs, VersionState, WeightKind

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
        name, seed = f"turn-{self.count}", self._seed(version)
        log_probs = self.engine.policy.log_probs((*PROMPT, *REPLY), len(PROMPT), seed)
        turn = make_turn(name, ids=REPLY, log_probs=log_probs, version=version)
        await give_sample(self.ledger, make_request(name, prompt=PROMPT), turn)

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
        true = (await self.engine.score(PROMPT, REPLY, lora_path="probe", extra_key=None)).log_probs
        await self.engine.unload_adapter("probe")
        probes = [probe_of(PROMPT, REPLY, true, error=probe_error, parent_error=0.01)] if has_probe else []
        return await self.ledger.commit(commit_of(lease, metrics=metrics, probes=probes))

    async def commit_full(self, *, probe_error: float = 0.0, step: float = 0.1) -> int:
        """One step of full weights: its probe is what the engine will answer once they are pushed, less an error."""
        await self.sampled((await self.ledger.tip()).weight_version)
        lease = await self.ledger.lease(trainer="test", now=True)
        assert lease is not None
        true = self.engine.policy.log_probs((*PROMPT, *REPLY), len(PROMPT), BASE_SEED ^ (lease.parent + 1))
        probes = [probe_of(PROMPT, REPLY, true, error=probe_error, parent_error=step)]
        body = commit_of(lease, kind=WeightKind.FULL, probes=probes, weights_file="model")
        (self.folder / body.manifest.folder).mkdir(parents=True)
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

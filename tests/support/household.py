"""A household: users with policies of their own on one engine with few places.

The engine is a fake, and so are the weights: the log-prob of a token shows the adapter that sampled it. The ledger, the
publisher, the admission and the loader are real.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from ledger import commit_of, give_sample, probe_of
from publishing import until
from turns import make_request, make_turn

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.errors import EngineRefused
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.publishing.engine_adapters import BESIDE
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.on_demand import OnDemand
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.settings import PublisherSettings, TrainingSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.testing import FakeEngine
from openclaw_rl.testing.fake_engine import Pacing
from openclaw_rl.testing.toy_policy import BASE_SEED, adapter_seed
from openclaw_rl.trainers.checkpoint import EMA_FOLDER
from openclaw_rl.types import Scope, VersionRun

PROMPT = (1, 5, 9)
ANN, BOB = "user:ann", "user:bob"


class SmallEngine(FakeEngine):
    """Refuses an adapter beyond its places; an EMA teacher needs none."""

    def __init__(self, places: int) -> None:
        super().__init__(pacing=Pacing(tokens_per_s=2000))
        self.places, self.most_held, self.loads = places, 0, 0

    async def load_adapter(self, name: str, folder: Path) -> None:
        if not name.startswith("ema-") and len(self.held) >= self.places:
            raise EngineRefused("there is no place for another adapter", status=400)
        await super().load_adapter(name, folder)
        self.loads += 1
        self.most_held = max(self.most_held, len(self.held))

    @property
    def held(self) -> list[str]:
        return [name for name in self.adapters if not name.startswith("ema-")]


class Household:
    """Users, their policies, and an engine with few places."""

    def __init__(self, ledger: Ledger, folder: Path, *, places: int, hold_s: float = 60.0) -> None:
        self.ledger, self.folder, self.engine = ledger, folder, SmallEngine(places + BESIDE)
        self.serving, self.health = VersionAdmission(hold_s), Health()
        settings = PublisherSettings(max_step_kl=5, max_base_kl=5, prewarm_sessions=1)
        self.policy = PolicyEngine(
            self.engine, self.serving, settings, folder, health=self.health, most_adapters=places
        )
        self.publisher = Publisher(ledger, self.policy, settings, health=self.health)
        self.on_demand = OnDemand(ledger, self.policy, start=self.start, health=self.health)
        self.serving.loader = self.on_demand
        self.start_at, self.count = 0, 0
        self.replies: list[tuple[str, int]] = []
        """Policy and version of each reply."""

    async def start(self) -> int:
        return self.start_at

    async def chat(self, policy: str, *, tokens: int = 4, samples: bool = True) -> int:
        """Answer a chat; check that its tokens are the user's own version's. Return the version."""
        self.count += 1
        name = f"{policy}-{self.count}"
        async with self.serving.use(policy=policy) as use:
            version = await self.ledger.version(use.weight_version)
            assert (version.policy, use.policy) == (policy, policy)
            seed = BASE_SEED if version.folder is None else adapter_seed(self.folder / version.folder)
            request = GenerateRequest(
                input_ids=list(PROMPT),
                sampling_params=EngineSampling(max_new_tokens=tokens, ignore_eos=True),
                stream=True,
                return_logprob=True,
                lora_path=use.lora_path,
                extra_key=use.cache_of(policy.removeprefix("user:")),
            )
            ids: list[int] = []
            log_probs: list[float] = []
            async with aclosing(self.engine.stream(request)) as events:
                async for event in events:
                    ids += event.output_ids
                    log_probs += [entry[0] or 0.0 for entry in event.meta_info.output_token_logprobs or []]
        own = self.engine.policy.log_probs((*PROMPT, *ids), len(PROMPT), seed)
        assert log_probs == list(own), f"{policy}: another's weights answered"
        self.replies.append((policy, use.weight_version))
        if samples:
            request_row = replace(
                make_request(name, prompt=PROMPT), scope=Scope(policy.removeprefix("user:"), name, policy)
            )
            runs = (VersionRun(use.weight_version, len(ids)),)
            turn = make_turn(name, ids=tuple(ids), log_probs=tuple(log_probs), runs=runs)
            await give_sample(self.ledger, request_row, turn)
        return use.weight_version

    async def step(self, *, probe_error: float = 0.0, has_ema: bool = False) -> tuple[str, int] | None:
        """Train one batch; return its policy and version. None: no sample waits."""
        lease = await self.ledger.lease(trainer="test", now=True)
        if lease is None:
            return None
        assert {run.weight_version for sample in lease.samples for run in sample.versions} <= {
            version.weight_version for version in await self.ledger.versions() if version.policy == lease.policy
        }
        folder = self.folder / "versions" / lease.lease_id
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(lease.lease_id.encode())
        if has_ema:
            (folder / EMA_FOLDER).mkdir()
            (folder / EMA_FOLDER / "adapter_model.safetensors").write_bytes(f"mean of {lease.lease_id}".encode())
        ids = lease.samples[0].response_ids
        true = self.engine.policy.log_probs((*PROMPT, *ids), len(PROMPT), adapter_seed(folder))
        probes = [probe_of(PROMPT, ids, true, error=probe_error, parent_error=0.01)]
        number = await self.ledger.commit(commit_of(lease, probes=probes))
        self.publisher.wake()
        return lease.policy, number

    async def trained(self, *, probe_error: float = 0.0, has_ema: bool = False) -> tuple[str, int]:
        """Train one batch, which waits; return its policy and version."""
        made = await self.step(probe_error=probe_error, has_ema=has_ema)
        assert made is not None
        return made

    async def decided(self) -> None:
        """Wait until the publisher has decided on every version."""

        async def all_are() -> bool:
            return not await self.ledger.unfinished_versions()

        await until(all_are)


@asynccontextmanager
async def household(folder: Path, *, places: int, hold_s: float = 60.0) -> AsyncIterator[Household]:
    training = TrainingSettings(min_batch=1, batch_size=4)
    ledger = await Ledger.open(
        folder / "ledger.sqlite3", identity=Identity("base", "tokenizer", "tiny"), training=training
    )
    house = Household(ledger, folder, places=places, hold_s=hold_s)
    await house.publisher.restore()
    tasks = [asyncio.create_task(house.publisher.run()), asyncio.create_task(house.on_demand.run())]
    try:
        yield house
        for task in tasks:
            assert not task.done(), task
        assert house.engine.most_held <= places + BESIDE
        assert await ledger.audit(is_deep=True) == []
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await ledger.aclose()


async def is_used(house: Household, number: int) -> bool:
    return bool(house.serving.users(number))


async def has_left(house: Household, number: int) -> bool:
    return f"policy-v{number}" not in house.engine.adapters

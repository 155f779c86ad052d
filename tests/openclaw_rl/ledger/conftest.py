"""A ledger in a temporary folder, a clock that only tests move, and a driver that brings turns to a state."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from episode_runner import Runner
from turns import make_request, make_turn, serve_turn

from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.trainer_protocol import Commit, Manifest, Probe, Report
from openclaw_rl.types import (
    SHARED_POLICY,
    DropReason,
    Lease,
    NextState,
    Sample,
    SamplingParams,
    TurnKey,
    Verdict,
    VersionRun,
    VersionState,
)

IDENTITY = Identity(base_hash="base-1", tokenizer_hash="tokenizer-1", model_name="tiny")


@dataclass
class ManualClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Driver:
    """Brings turns through a ledger, so that a test names only the values that it checks."""

    ledger: Ledger
    count: int = 0
    key: TurnKey = field(default=TurnKey("r", "b", "h"))

    async def served(
        self,
        *,
        version: int = 0,
        runs: tuple[VersionRun, ...] | None = None,
        drop: DropReason | None = None,
        user: str = "ann",
        session: str | None = "s",
        prompt: tuple[int, ...] = (1, 2, 3),
        mask: tuple[bool, ...] | None = None,
        policy: str = SHARED_POLICY,
    ) -> str:
        self.count += 1
        request_id, turn_id = f"request-{self.count}", f"turn-{self.count}"
        request = make_request(
            request_id,
            user=user,
            session=session,
            text=f"question {self.count}",
            prompt=prompt,
            at=1000.0 + self.count,
            sampling=SamplingParams(max_new_tokens=16),
        )
        request = replace(request, scope=replace(request.scope, policy=policy))
        turn = make_turn(
            turn_id,
            request=request_id,
            runs=runs or (VersionRun(version, 4),),
            mask=mask,
            reply=f"answer {self.count}",
            drop=drop,
            at=1000.0 + self.count,
        )
        await serve_turn(self.ledger, request, turn, self.key)
        return turn_id

    async def commit(
        self,
        lease: Lease,
        *,
        durable: bool = True,
        drop: dict[str, str] | None = None,
        base_hash: str = "base-1",
        folder: str | None = None,
        probe: Probe | None = None,
    ) -> int:
        folder = folder or f"versions/{lease.lease_id}"
        kind = (await self.ledger.tip()).kind
        manifest = Manifest(folder=folder, kind=kind, base_hash=base_hash, sha256=f"sha-{lease.fence}")
        probe = probe or Probe(prompt_ids=[1], response_ids=[2], log_probs=[-1.0], parent_log_probs=[-1.5])
        return await self.ledger.commit(
            Commit(
                lease_id=lease.lease_id,
                fence=lease.fence,
                parent=lease.parent,
                manifest=manifest,
                report=Report(metrics={"loss": 0.5}, probes=[probe]),
                durable=durable,
                drop=drop or {},
            )
        )

    async def step(self, *, size: int = 1, durable: bool = True, version: int = 0) -> tuple[int, list[str]]:
        """Sample, lease and commit one batch; its version and its turns."""
        turns = [await self.sampled(version=version) for _ in range(size)]
        lease = await self.ledger.lease(trainer="test", now=True)
        assert lease is not None
        assert [sample.sample_id for sample in lease.samples] == turns
        return await self.commit(lease, durable=durable), turns

    async def serve(self, version: int) -> None:
        for state in (VersionState.GATED, VersionState.LOADING, VersionState.SERVING):
            await self.ledger.set_version_state(version, state)

    async def state(self, turn_id: str) -> str:
        """`sampled`, `dropped.stale` …"""
        record = await self.ledger.turn(turn_id)
        assert record is not None
        return record.state if record.reason is None else f"{record.state}.{record.reason}"

    async def paired(self, *, is_tool: bool = False, **kwargs: object) -> str:
        turn_id = await self.served(**kwargs)  # type: ignore[arg-type]
        message = Message(role="tool", content="ok") if is_tool else Message(role="user", content="thanks")
        await self.ledger.pair(turn_id, NextState((message,)), by_request_id=f"after-{turn_id}")
        return turn_id

    async def judged(self, **kwargs: object) -> str:
        turn_id = await self.paired(**kwargs)  # type: ignore[arg-type]
        await self.ledger.record_verdict(turn_id, Verdict(1, (1, 1, None), "rules", "thanks"))
        return turn_id

    async def sampled(self, **kwargs: object) -> str:
        turn_id = await self.judged(**kwargs)
        (judged,) = [judged for judged in await self.ledger.to_score(1000) if judged.turn.turn_id == turn_id]
        turn = judged.turn
        await self.ledger.record_sample(
            Sample(
                sample_id=turn_id,
                prompt_ids=judged.request.prompt_ids,
                response_ids=turn.response_ids,
                loss_mask=turn.loss_mask,
                rollout_log_probs=turn.rollout_log_probs,
                versions=turn.versions,
                temperature=0.7,
                is_tool_turn=judged.next_state.is_tool,
                reward=1.0,
            )
        )
        return turn_id


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def training() -> TrainingSettings:
    return TrainingSettings(batch_size=4, min_batch=2, max_wait_s=100, max_staleness=2, lease_s=60)


@pytest.fixture
def ledger_path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "ledger.sqlite"


@pytest.fixture
def identity() -> Identity:
    return IDENTITY


@pytest.fixture
async def ledger(
    ledger_path: Path, identity: Identity, training: TrainingSettings, clock: ManualClock
) -> AsyncIterator[Ledger]:
    opened = await Ledger.open(ledger_path, identity=identity, training=training, clock=clock)
    yield opened
    await opened.aclose()


@pytest.fixture
def driver(ledger: Ledger) -> Driver:
    return Driver(ledger)


@pytest.fixture
def make_driver() -> type[Driver]:
    return Driver


@pytest.fixture
async def runner(ledger: Ledger) -> AsyncIterator[Runner]:
    runner = Runner(ledger)
    yield runner
    if not ledger.is_closed:
        assert await ledger.audit(is_deep=True) == []

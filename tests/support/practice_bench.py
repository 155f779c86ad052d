"""A practice loop on a real ledger and a fake engine, with parts that say what a test wants."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.ledger import Ledger
from openclaw_rl.methods.base import Dropped, ScoringTools, sample_of
from openclaw_rl.practice.deps import PracticeDeps
from openclaw_rl.practice.loop import PracticeLoop
from openclaw_rl.practice.measuring import Measure
from openclaw_rl.practice.sampling import ReplySampler
from openclaw_rl.proxy.activity import ChatActivity
from openclaw_rl.settings import PracticeSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.testing import FakeEngine
from openclaw_rl.trainer_protocol import Commit, Manifest, Report
from openclaw_rl.types import DropReason, HintTerm, JudgedTurn, Request, Sample, SamplingParams, Verdict, VersionState


class Characters:
    """A front end of characters."""

    end_ids = frozenset({0})
    vocab_size = 0x110000

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


def render(messages: Any, tools_json: str | None, template_kwargs_json: str | None) -> tuple[int, ...]:
    return tuple(map(ord, "".join(f"<{message.role}>{message.text()}" for message in messages)))


class Practising:
    """A method that makes a sample of every practice reply, and remembers what it was asked."""

    name, practises = "practising", True

    def __init__(self) -> None:
        self.asked: list[tuple[JudgedTurn, str | None]] = []
        self.refuses = False
        self.fails: Exception | None = None

    async def practise(self, judged: JudgedTurn, hint: str | None, tools: ScoringTools) -> Sample | Dropped:
        if self.fails is not None:
            raise self.fails
        self.asked.append((judged, hint))
        if self.refuses and hint is not None:
            return Dropped(DropReason.METHOD, "prompt_changed")
        term = HintTerm(text=hint, source="practice")
        own = judged.turn.rollout_log_probs
        reward = None if judged.verdict is None else float(judged.verdict.value)
        return sample_of(judged, reward=reward, teacher_log_probs=own, student_log_probs=own, hint=term)


class FixedMeter:
    """Measures what a test says."""

    def __init__(self) -> None:
        self.share: float | None = 0.0
        self.kl: float | None = 0.1
        self.measured: list[int] = []

    async def measure(self, wish: Any, others: Any, replies: Any, *, uncorrected: Any = ()) -> Measure:
        self.measured.append(wish.wish_id)
        return Measure(self.share, self.kl)

    def forget_all_but(self, wishes: Any, replies: Any = ()) -> None: ...


class Answers:
    """Says of one reply after the other whether it answers, over and over: `y` or `n`."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.asked = pattern, 0
        self.turns: list[str | None] = []
        self.kept: set[str] | None = None
        """Turns that the loop last named as practised still."""

    async def answers(self, turn_id: str | None, request: Request, reply: str) -> bool:
        self.asked += 1
        self.turns.append(turn_id)
        return self.pattern[(self.asked - 1) % len(self.pattern)] == "y"

    def forget_all_but(self, turn_ids: Any) -> None:
        self.kept = set(turn_ids)


class Varied:
    """Writes of each prompt the variant that ends in 9, or none."""

    def __init__(self, *, has_one: bool = True) -> None:
        self.has_one = has_one
        self.asked: list[tuple[str, str]] = []
        self.kept: set[str] | None = None

    async def of(self, turn_id: str, request: Request, words: str) -> Request | None:
        self.asked.append((turn_id, words))
        return replace(request, prompt_ids=(*request.prompt_ids, 9)) if self.has_one else None

    def forget_all_but(self, turn_ids: Any) -> None:
        self.kept = set(turn_ids)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    ledger: Ledger
    engine: FakeEngine
    settings: PracticeSettings
    clock: Clock = field(default_factory=Clock)
    method: Practising = field(default_factory=Practising)
    meter: FixedMeter = field(default_factory=FixedMeter)
    health: Health = field(default_factory=Health)
    serving: VersionAdmission = field(default_factory=lambda: VersionAdmission(hold_s=1.0))
    batches: int = 0
    is_alive: bool = True
    vote: Callable[[JudgedTurn, str], Awaitable[Verdict | None]] | None = None
    contradicts: Callable[[str, str], Awaitable[bool]] | None = None
    relevance: "Answers | None" = None
    variants: "Varied | None" = None

    def __post_init__(self) -> None:
        self.serving.switch(0, None)
        self.activity = ChatActivity(self.clock)
        self.clock.now += 1000.0
        self.loop = self.make()

    def make(self) -> PracticeLoop:
        def on_batch() -> None:
            self.batches += 1

        sampler = ReplySampler(
            engine=self.engine,
            serving=self.serving,
            frontend=Characters(),
            render=render,
            context_length=4000,
            max_tokens=8,
            sampling=SamplingParams(64),
            clock=self.clock,
        )
        deps = PracticeDeps(
            ledger=self.ledger,
            activity=self.activity,
            method=self.method,  # type: ignore[arg-type]
            tools=ScoringTools(),
            sampler=sampler,
            meter=self.meter,  # type: ignore[arg-type]
            health=self.health,
            on_batch=on_batch,
            trainer_lives=lambda: self.is_alive,
            batch_size=8,
            aim=1.3,
            vote=self.vote,
            contradicts=self.contradicts,
            relevance=self.relevance,  # type: ignore[arg-type]
            variants=self.variants,  # type: ignore[arg-type]
        )
        return PracticeLoop(deps, self.settings, clock=self.clock, poll_s=0.001)

    async def train(self) -> int:
        """Train what waits, and let the version serve."""
        lease = await self.ledger.lease(trainer="test")
        assert lease is not None
        manifest = Manifest(folder=f"v/{lease.lease_id}", kind="lora", base_hash="base", sha256="x")
        step = Commit(
            lease_id=lease.lease_id,
            fence=lease.fence,
            parent=lease.parent,
            manifest=manifest,
            report=Report(metrics={}),
        )
        version = await self.ledger.commit(step)
        for state in (VersionState.GATED, VersionState.LOADING, VersionState.SERVING):
            await self.ledger.set_version_state(version, state)
        self.engine.adapters[f"policy-v{version}"] = version
        self.serving.switch(version, f"policy-v{version}", lease.policy)
        return version

    async def practice(self) -> list[Any]:
        return [row for row in await self.ledger.turns(limit=1000) if row.practice is not None]

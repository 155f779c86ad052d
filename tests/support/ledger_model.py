"""Model of the ledger in plain dicts, without SQL: turns, versions, the lease, and the changes of their states."""

import asyncio
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize
from turns import make_request, make_turn, serve_turn

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.trainer_protocol import Commit, Manifest, Report
from openclaw_rl.types import DropReason, Lease, NextState, Sample, Verdict, VersionRun, VersionState, WeightKind

IDENTITY = Identity("base", "tokenizer", "tiny")
TRAINING = TrainingSettings(batch_size=3, min_batch=2, max_wait_s=50, max_staleness=2, max_tool_share=0.5, lease_s=20)
FAST = Path("/dev/shm")
"""A folder in memory if there is one. Power failures are simulated in this file, and fsyncs would dominate the time."""
DEAD = {"rejected", "rolled_back", "lost"}
REVIVABLE = {"dropped.no_next_state", "dropped.method", "dropped.neutral", "dropped.unjudged"}


@dataclass
class ModelTurn:
    versions: set[int]
    state: str = "served"
    is_tool: bool = False
    is_demonstration: bool = False
    has_next_state: bool = False
    verdict: int | None = None
    is_rated: bool = False
    has_comment: bool = False
    late: list[tuple[float | None, bool]] = field(default_factory=list)
    """Value, and whether there was a comment: said while a trainer had the turn."""
    sampled_at: float = 0.0
    trained_in: list[int] = field(default_factory=list)
    """Every version that ever trained on it, dead ones too."""


@dataclass
class ModelVersion:
    parent: int | None
    state: str
    is_durable: bool = True
    is_commit: bool = True


class LedgerModel(RuleBasedStateMachine):
    """A ledger, and beside it the model that says what each call does. The rules are its subclass's."""

    @initialize(seed=st.integers(0, 2**16))
    def open(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp(dir=FAST if FAST.is_dir() else None))
        self.opened = 0
        self.now = 1000.0
        self.turns: dict[str, ModelTurn] = {}
        self.said = 0
        self.versions = {0: ModelVersion(None, "serving")}
        self.tip = 0
        self.leases: list[Lease] = []
        self.held: set[str] = set()
        """The turns of the live lease."""
        self.deadline = 0.0
        self.holder = ""
        self.committed: dict[str, int] = {}
        self.ledger = self._open(self.root / "0")

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.do(self.ledger.aclose())
            self.runner.close()
            shutil.rmtree(self.root)

    def do(self, call):
        return self.runner.run(call)

    def refuse(self, call, error=LedgerError) -> None:
        with pytest.raises(error):
            self.do(call)

    def _open(self, folder: Path) -> Ledger:
        opening = Ledger.open(folder / "l.sqlite", identity=IDENTITY, training=TRAINING, clock=lambda: self.now)
        return self.do(opening)

    def some(self, *states: str, **fields: object) -> str | None:
        found = [
            turn_id
            for turn_id, turn in self.turns.items()
            if turn.state in states and all(getattr(turn, name) == value for name, value in fields.items())
        ]
        return self.random.choice(found) if found else None

    def some_version(self) -> int:
        """Mostly one that is alive, and seldom the base: cutting at it leaves little."""
        return self.random.choice(self.random.choice([self.path(), self.path()[:-1] or [0], list(self.versions)]))

    def path(self) -> list[int]:
        """The tip and its ancestors, newest first."""
        found, version = [], self.tip
        while version is not None:
            found.append(version)
            version = self.versions[version].parent
        return found

    def depth(self, number: int) -> int:
        """Return the commits between the base and a version."""
        version = self.versions[number]
        return 0 if version.parent is None else self.depth(version.parent) + version.is_commit

    async def _serve(self, name: str, runs: tuple[VersionRun, ...], drop: DropReason | None) -> None:
        request = make_request(name, user="u", at=self.now)
        await serve_turn(self.ledger, request, make_turn(name, runs=runs, drop=drop, at=self.now))

    def effect_of(self, name: str, value: float | None, comment: bool) -> str:
        turn = self.turns[name]
        if value is None and not comment:
            return "recorded"
        if turn.state in ("leased", "trained"):
            turn.late.append((value, comment))
            return "late"
        if turn.state.startswith("dropped") and turn.state not in REVIVABLE:
            return "recorded"
        before, state = turn.verdict, turn.state
        if value is not None:
            turn.verdict = (value > 0) - (value < 0)
        if state == "judged":
            return "recorded" if value is None else "judged"
        if state == "sampled" and not comment and before == turn.verdict:
            return "recorded"
        if state in ("served", "paired") and value is None:
            return "recorded"
        turn.state, turn.late = "judged", []
        return "rescored" if state == "sampled" or value is None else "judged"

    def wait_again(self, name: str) -> None:
        """Let a turn wait again after its lease or version ended; late feedback takes effect now."""
        turn = self.turns[name]
        turn.state = "sampled"
        if turn.late:
            values = [value for value, _ in turn.late if value is not None]
            comment = any(has_comment for _, has_comment in turn.late)
            turn.late = []
            self.effect_of(name, values[-1] if values else None, comment)

    def sample(self, name: str) -> None:
        (judged,) = [judged for judged in self.do(self.ledger.to_score(1000)) if judged.turn.turn_id == name]
        turn, is_tool, verdict = judged.turn, judged.next_state.is_tool, self.turns[name].verdict
        assert (judged.verdict and judged.verdict.value) == verdict
        sample = Sample(
            name,
            (1, 2),
            turn.response_ids,
            turn.loss_mask,
            turn.rollout_log_probs,
            turn.versions,
            0.7,
            is_tool,
            float(verdict) if verdict else None,
        )
        self.do(self.ledger.record_sample(sample))
        self.turns[name].state, self.turns[name].sampled_at = "sampled", self.now

    def a_few_turns_go_all_the_way(self, n: int, version: str) -> None:
        for _ in range(n):
            parent = self.versions[self.tip].parent
            chosen = {"tip": self.tip, "parent": parent or 0, "any": self.some_version()}[version]
            runs = (chosen, self.some_version()) if self.random.random() < 0.2 else (chosen,)
            name = f"t{len(self.turns)}"
            self.do(self._serve(name, tuple(VersionRun(run, 2) for run in runs), None))
            is_tool = self.random.random() < 0.3
            message = Message(role="tool" if is_tool else "user", content="n")
            self.do(self.ledger.pair(name, NextState((message,)), by_request_id="x"))
            self.do(self.ledger.record_verdict(name, Verdict(1, (1,), "rules")))
            self.turns[name] = ModelTurn(set(runs), "judged", is_tool, has_next_state=True, verdict=1)
            self.sample(name)

    def lease_a_batch(self, *, now: bool, n: int | None, trainer: str) -> None:
        lease = self.do(self.ledger.lease(trainer=trainer, n=n, now=now))
        if self.held and self.now < self.deadline and trainer != self.holder:
            assert lease is None
            return
        self.end_lease()
        expected = self.expected_batch(n or TRAINING.batch_size, now=now)
        assert (None if lease is None else sorted(sample.sample_id for sample in lease.samples)) == expected
        if lease is not None:
            assert lease.parent == self.tip
            assert all(lease.fence > earlier.fence for earlier in self.leases)
            self.leases.append(lease)
            self.held, self.deadline, self.holder = set(expected), self.now + TRAINING.lease_s, trainer
            for name in self.held:
                self.turns[name].state = "leased"

    def expected_batch(self, size: int, *, now: bool) -> list[str] | None:
        """Return the samples that the lease must have, and drop the unfit ones before them."""
        depths = {number: self.depth(number) for number in self.versions}
        bad = {number for number, version in self.versions.items() if version.state in ("rejected", "rolled_back")}
        fit: dict[bool, list[str]] = {False: [], True: []}
        for name in sorted(self.turns, key=lambda name: self.turns[name].sampled_at):  # of equals, the older row
            turn = self.turns[name]
            if turn.state != "sampled" or len(fit[turn.is_tool]) == size:
                continue
            if turn.is_demonstration:
                fit[False].append(name)
            elif turn.versions & bad:
                turn.state = "dropped.rolled_back"
            elif depths[self.tip] - min(depths[version] for version in turn.versions) > TRAINING.max_staleness:
                turn.state = "dropped.stale"
            else:
                fit[turn.is_tool].append(name)
        batch = fit[False][:size]
        for name in fit[True]:
            tools = len(batch) - len(fit[False][:size]) + 1
            if len(batch) < size and tools <= TRAINING.max_tool_share * (len(batch) + 1):
                batch.append(name)
        oldest = min((self.turns[name].sampled_at for name in batch), default=self.now)
        is_late = self.now - oldest >= TRAINING.max_wait_s
        if not batch or len(batch) < (1 if now else min(TRAINING.min_batch, size) if is_late else size):
            return None
        return sorted(batch)

    def end_lease(self, *, drop: str | None = None) -> None:
        for name in self.held:
            if name == drop:
                self.turns[name].state = "dropped.too_long"
            else:
                self.wait_again(name)
        self.held = set()

    def step(self, lease: Lease, *, durable: bool) -> Commit:
        manifest = Manifest(folder=f"v/{lease.lease_id}", kind=WeightKind.LORA, base_hash="base", sha256="x")
        return Commit(
            lease_id=lease.lease_id,
            fence=lease.fence,
            parent=lease.parent,
            manifest=manifest,
            report=Report(metrics={}),
            durable=durable,
        )

    def commit_the_lease(self, durable: bool) -> None:
        lease = self.leases[-1]
        number = self.do(self.ledger.commit(self.step(lease, durable=durable)))
        assert number == len(self.versions)
        self.versions[number] = ModelVersion(self.tip, "candidate", durable)
        self.tip, self.committed[lease.lease_id] = number, number
        for name in self.held:
            self.turns[name].state = "trained"
            self.turns[name].trained_in.append(number)
        self.held = set()

    def publish_the_tip(self) -> None:
        version = self.versions[self.tip]
        if version.state == "candidate":
            for state in (VersionState.GATED, VersionState.LOADING, VersionState.SERVING):
                self.do(self.ledger.set_version_state(self.tip, state))
            self.serve(self.tip)

    def serve(self, number: int) -> None:
        for other in self.versions.values():
            if other.state == "serving":
                other.state = "retired"
        self.versions[number].state = "serving"

    def free(self, version: int, state: str) -> None:
        for name, turn in self.turns.items():
            if turn.state == "trained" and turn.trained_in[-1] == version:
                if state == "sampled":
                    self.wait_again(name)
                else:
                    turn.state = state

    def cut(self, dead: set[int], tip: int) -> None:
        self.tip = tip
        if self.held and self.leases[-1].parent in dead:
            self.end_lease()

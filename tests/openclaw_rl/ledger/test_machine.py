"""Any sequence of calls, crashes between them included, against a model that knows nothing of SQL.

The model holds turns, versions and the lease in plain dicts and says what each call must do. After every step the audit
is clean, the states and counts are the model's, and no turn has trained two versions of one ancestry.
"""

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from openclaw_rl.errors import CommitRefused, LedgerError
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.trainers.api import Commit, Manifest, Report
from openclaw_rl.types import (
    DropReason,
    Feedback,
    Lease,
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

IDENTITY = Identity("base", "tokenizer", "tiny")
TRAINING = TrainingSettings(batch_size=3, min_batch=2, max_wait_s=50, max_staleness=2, max_tool_share=0.5, lease_s=20)
FAST = Path("/dev/shm")
"""In memory where there is such a place: the power fails only in this file, and fsync would be most of the test."""
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


class LedgerMachine(RuleBasedStateMachine):
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

    # Turns

    @rule(data=st.data(), drop=st.sampled_from([None, None, None, DropReason.CANCELLED, DropReason.OPTED_OUT]))
    def serve_a_turn(self, data, drop) -> None:
        name = f"t{len(self.turns)}"
        known = sorted(self.versions)
        runs = data.draw(st.lists(st.sampled_from(known[-4:]), min_size=1, max_size=2))
        self.do(self._serve(name, tuple(VersionRun(version, 2) for version in runs), drop))
        self.turns[name] = ModelTurn(set(runs), "served" if drop is None else f"dropped.{drop}")

    async def _serve(self, name: str, runs: tuple[VersionRun, ...], drop: DropReason | None) -> None:
        n = 2 * len(runs)
        message = Message(role="user", content="q")
        request = Request(name, Scope("u", "s"), self.now, (message,), None, None, (1, 2), SamplingParams(8))
        reply = Message(role="assistant", content="a")
        turn = Turn(name, name, self.now, (7,) * n, (-1.0,) * n, (True,) * n, runs, "stop", reply, drop=drop)
        await asyncio.gather(self.ledger.begin(request), self.ledger.finish(turn, TurnKey("r", "b", "h")))

    @rule(is_tool=st.booleans())
    def pair_a_turn(self, is_tool) -> None:
        if (name := self.some("served")) is not None:
            message = Message(role="tool" if is_tool else "user", content="n")
            self.do(self.ledger.pair(name, NextState((message,)), by_request_id="x"))
            self.turns[name].state, self.turns[name].is_tool = "paired", is_tool
            self.turns[name].has_next_state = True
        if (name := self.some("judged", has_next_state=False)) is not None:  # its user was faster
            message = Message(role="tool" if is_tool else "user", content="n")
            self.do(self.ledger.pair(name, NextState((message,)), by_request_id="x"))
            self.turns[name].is_tool = is_tool
            self.turns[name].has_next_state = True

    @rule()
    def a_session_ends(self) -> None:
        if (name := self.some("served")) is not None:
            self.do(self.ledger.drop(name, DropReason.NO_NEXT_STATE))
            self.turns[name].state = "judged" if self.turns[name].has_comment else "dropped.no_next_state"

    @rule(value=st.sampled_from([None, 1.0, -1.0, 0.0, 0.5]), comment=st.booleans(), demonstration=st.booleans())
    def a_user_says_something(self, value, comment, demonstration) -> None:
        names = [name for name, turn in self.turns.items() if not turn.is_demonstration]
        if not names or not (comment or demonstration or value is not None):
            return
        name = self.random.choice(names)
        feedback = Feedback(
            f"f{self.said}", name, self.now, value, "c" if comment else None, "d" if demonstration else None
        )
        self.said += 1
        outcome = self.do(self.ledger.record_feedback(feedback, user="u", demonstration=(7,)))
        assert outcome.effect == self.effect_of(name, value, comment)
        turn = self.turns[name]
        turn.is_rated |= value is not None
        turn.has_comment |= comment
        if demonstration and turn.state != "dropped.opted_out":
            for other, its in self.turns.items():
                if other.startswith(f"{name}-demo") and its.state == "sampled":
                    its.state = "dropped.superseded"
            self.turns[str(outcome.demonstration_id)] = ModelTurn(
                {self.tip}, "sampled", is_demonstration=True, sampled_at=self.now
            )

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
        """Its lease or its version came to nothing; what was said meanwhile counts now."""
        turn = self.turns[name]
        turn.state = "sampled"
        if turn.late:
            values = [value for value, _ in turn.late if value is not None]
            comment = any(has_comment for _, has_comment in turn.late)
            turn.late = []
            self.effect_of(name, values[-1] if values else None, comment)

    @rule(value=st.sampled_from([1, -1, 1, 0, None]))
    def judge_a_turn(self, value) -> None:
        verdict = None if value is None else Verdict(value, (value,), "rules")
        if (name := self.some("paired")) is not None:
            self.do(self.ledger.record_verdict(name, verdict))
            self.turns[name].state, self.turns[name].verdict = "judged", value
        if (other := self.some("served", "judged", "sampled", "leased", "trained")) is not None:
            if self.turns[other].is_rated:
                self.do(self.ledger.record_verdict(other, verdict))  # the user was faster: no change
            else:
                self.refuse(self.ledger.record_verdict(other, verdict))

    @rule(wait=st.sampled_from([0.0, 1.0]))
    def sample_a_turn(self, wait) -> None:
        if (name := self.some("judged")) is not None:
            self.now += wait
            self.sample(name)

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

    @rule(n=st.integers(1, 4), version=st.sampled_from(["tip", "parent", "any"]))
    def a_few_turns_wait(self, n, version) -> None:
        self.a_few_turns_go_all_the_way(n, version)

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

    @rule()
    def drop_a_turn(self) -> None:
        if (name := self.some("served", "paired", "judged", "sampled")) is not None:
            self.do(self.ledger.drop(name, DropReason.METHOD))
            self.turns[name].state = "dropped.method"
        if (name := self.some("leased", "trained")) is not None:
            self.refuse(self.ledger.drop(name, DropReason.METHOD))

    # Training

    @rule(seconds=st.sampled_from([1.0, 19.0, 21.0, 60.0]))
    def time_passes(self, seconds) -> None:
        self.now += seconds

    @rule(now=st.booleans(), n=st.sampled_from([None, None, 1, 2, 5]), trainer=st.sampled_from("mno"))
    def a_trainer_asks(self, now, n, trainer) -> None:
        self.lease_a_batch(now=now, n=n, trainer=trainer)

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
        """What the lease must hold; drops the unfit it must have met on the way."""
        path = self.path()
        ages: dict[int, int] = {}
        commits = 0
        for version in path:
            ages[version] = commits
            commits += self.versions[version].is_commit
        fit: dict[bool, list[str]] = {False: [], True: []}
        for name in sorted(self.turns, key=lambda name: self.turns[name].sampled_at):  # of equals, the older row
            turn = self.turns[name]
            if turn.state != "sampled" or len(fit[turn.is_tool]) == size:
                continue
            if turn.is_demonstration:
                fit[False].append(name)
            elif not turn.versions <= set(path):
                turn.state = "dropped.rolled_back"
            elif ages[min(turn.versions)] > TRAINING.max_staleness:
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

    @precondition(lambda self: self.leases)
    @rule()
    def renew_the_lease(self) -> None:
        lease = self.leases[-1]
        if self.held:
            assert self.do(self.ledger.renew(lease.lease_id, lease.fence)) == self.now + TRAINING.lease_s
            self.deadline = self.now + TRAINING.lease_s
        else:
            self.refuse(self.ledger.renew(lease.lease_id, lease.fence), CommitRefused)

    @precondition(lambda self: self.held)
    @rule(drops_one=st.booleans())
    def release_the_lease(self, drops_one) -> None:
        lease = self.leases[-1]
        drop = self.random.choice(sorted(self.held)) if drops_one else None
        drops = {} if drop is None else {drop: DropReason.TOO_LONG}
        self.do(self.ledger.release(lease.lease_id, lease.fence, reason="test", drop=drops))
        self.end_lease(drop=drop)

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

    @precondition(lambda self: self.held)
    @rule(durable=st.booleans())
    def a_step_is_committed(self, durable) -> None:
        self.commit_the_lease(durable)

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

    @precondition(lambda self: self.leases)
    @rule()
    def commit_an_old_lease_again(self) -> None:
        lease = self.random.choice(self.leases[:-1] if self.held else self.leases) if len(self.leases) > 1 else None
        if lease is None:
            return
        number = self.committed.get(lease.lease_id)
        commit = self.ledger.commit(self.step(lease, durable=True))
        if number is None or self.versions[number].state in DEAD:
            self.refuse(commit, CommitRefused)
        else:
            assert self.do(commit) == number

    @rule(durable=st.booleans(), publish=st.booleans(), from_parent=st.booleans())
    def a_whole_step(self, durable, publish, from_parent) -> None:
        """So that chains grow long in short runs too."""
        self.now += TRAINING.lease_s  # whatever was leased goes back
        self.a_few_turns_go_all_the_way(2, "parent" if from_parent else "tip")
        self.lease_a_batch(now=True, n=None, trainer="m")
        if self.held:
            self.commit_the_lease(durable)
        if publish:
            self.publish_the_tip()

    # Versions

    @rule()
    def the_tip_is_published(self) -> None:
        self.publish_the_tip()

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

    @rule()
    def reject_a_version(self) -> None:
        number = self.some_version()
        path = self.path()
        above = path[: path.index(number) + 1] if number in path else []
        if not above or number == 0 or any(self.versions[n].state == "serving" for n in above):
            self.refuse(self.ledger.reject(number, "no"))
            return
        parent = self.versions[number].parent
        assert self.do(self.ledger.reject(number, "no")) == above
        for n in above:
            self.versions[n].state = "rejected"
            self.free(n, "dropped.gate_rejected" if n == number else "sampled")
        self.cut(set(above), parent)

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

    @rule(requeue=st.booleans())
    def roll_back(self, requeue) -> None:
        to = self.some_version()
        path = self.path()
        version = self.versions[to]
        if to not in path or version.state not in ("serving", "retired") or not version.is_durable:
            self.refuse(self.ledger.rollback(to, requeue=requeue))
            return
        self.do(self.ledger.rollback(to, requeue=requeue))
        after = path[: path.index(to)]
        for n in after:
            self.versions[n].state = "rolled_back"
            self.free(n, "sampled" if requeue else "dropped.rolled_back")
        self.serve(to)
        self.cut(set(after), to)

    @rule()
    def a_version_becomes_durable(self) -> None:
        number = self.some_version()
        if self.versions[number].state in DEAD:
            self.refuse(self.ledger.durable(number), CommitRefused)
        else:
            self.do(self.ledger.durable(number))
            self.versions[number].is_durable = True

    @rule()
    def the_trainer_loses_what_it_had_not_saved(self) -> None:
        path = self.path()
        kept = next(n for n in path if self.versions[n].is_durable)
        lost = path[: path.index(kept)]
        version = self.do(self.ledger.lose_undurable("crash"))
        if not lost:
            assert version is None
            return
        serves = any(self.versions[n].state == "serving" for n in [*lost, kept])
        for n in lost:
            self.versions[n].state = "lost"
            self.free(n, "sampled")
        number = len(self.versions)
        assert version.weight_version == number
        passed = serves or self.versions[kept].state == "retired"
        self.versions[number] = ModelVersion(kept, "retired" if passed else "candidate", is_commit=False)
        if serves:
            self.serve(number)
        self.cut(set(lost), number)

    # The world

    @rule(torn=st.binary(max_size=64))
    def the_power_fails(self, torn) -> None:
        """The files as they are now, and half a write on top of them, are all that is left."""
        self.opened += 1
        before, after = self.root / str(self.opened - 1), self.root / str(self.opened)
        after.mkdir()
        for name in ("l.sqlite", "l.sqlite-wal"):
            shutil.copy(before / name, after / name)
        with (after / "l.sqlite-wal").open("ab") as wal:
            wal.write(torn)
        self.do(self.ledger.aclose())
        shutil.rmtree(before)
        self.ledger = self._open(after)
        if self.held and self.now >= self.deadline:
            self.end_lease()

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.do(self.ledger.audit()) == []
        counts = self.do(self.ledger.counts())
        states = Counter(turn.state for turn in self.turns.values())
        groups = ("served", "paired", "judged", "sampled", "leased", "trained")
        assert {k: n for k, n in counts.items() if n and (k in groups or k.startswith("dropped."))} == dict(states)
        assert [str(version.state) for version in self.do(self.ledger.versions())] == [
            version.state for _, version in sorted(self.versions.items())
        ]
        assert self.do(self.ledger.tip()).weight_version == self.tip
        assert self.versions[self.do(self.ledger.serving_version())].state == "serving"
        listed = {turn.turn_id: turn for turn in self.do(self.ledger.turns(limit=10_000))}
        for name, turn in self.turns.items():
            found = listed[name]
            assert (found.state if found.reason is None else f"dropped.{found.reason}") == turn.state

    @invariant()
    def nothing_trains_twice_in_one_ancestry(self) -> None:
        for turn in getattr(self, "turns", {}).values():
            for version in turn.trained_in:
                above = self.versions[version].parent
                while above is not None:
                    assert above not in turn.trained_in
                    above = self.versions[above].parent


LedgerMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedgerMachine = LedgerMachine.TestCase

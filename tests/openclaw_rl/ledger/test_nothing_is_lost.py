"""Feedback between steps, crashes at any point, checkpoints, rollbacks, pins and deletions in any order.

Over the real ledger, of a trainer of full weights that checkpoints now and then. No sample goes unless a rollback went
behind the version that sampled it, or gave up the one that trained it, or its session was forgotten. A way back is the
newest good version that exists, and the kept ones are distinct weights.
"""

import asyncio
import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from turns import make_request, make_turn, serve_turn

from openclaw_rl.errors import CommitRefused, LedgerError
from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.settings import TrainingSettings
from openclaw_rl.trainer_protocol import Commit, Manifest, Report
from openclaw_rl.types import (
    SHARED_POLICY,
    Lease,
    NextState,
    Sample,
    Verdict,
    Version,
    VersionRun,
    VersionState,
    WeightKind,
)

KEPT = 2
FAST = Path("/dev/shm")
IDENTITY = Identity("base", "tokenizer", "tiny", WeightKind.FULL)
TRAINING = TrainingSettings(batch_size=2, min_batch=1, max_staleness=1000)
PASSED = (VersionState.SERVING, VersionState.RETIRED, VersionState.SUPERSEDED)
DEAD = (VersionState.LOST, VersionState.ROLLED_BACK, VersionState.REJECTED)


class Node(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**16))
    def open(self, seed: int) -> None:
        self.random, self.runner = random.Random(seed), asyncio.Runner()
        self.root = Path(tempfile.mkdtemp(dir=FAST if FAST.is_dir() else None))
        self.waiting: dict[str, str] = {}
        """Turns without a verdict, and their state."""
        self.sessions: dict[str, list[str]] = {}
        self.sampled_by: dict[str, int] = {}
        self.named = 0
        self.gone_back_from: set[int] = set()
        self.given_up: set[int] = set()
        """Versions that a rollback abandoned with their samples."""
        self.lease: Lease | None = None
        self.fences: dict[int, int] = {}
        self.ledger = self._open()
        self.training_goes_on(6)

    def _open(self) -> Ledger:
        return self.do(Ledger.open(self.root / "l.sqlite", identity=IDENTITY, training=TRAINING))

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.do(self.ledger.aclose())
            self.runner.close()
            shutil.rmtree(self.root)

    def do(self, call):
        return self.runner.run(call)

    def versions(self) -> list[Version]:
        return self.do(self.ledger.versions())

    def alive(self) -> list[Version]:
        return [version for version in self.versions() if version.state not in DEAD]

    def ways_back(self) -> list[int]:
        """The versions that passed the gate, whose weights exist and can be trained from."""
        return [
            version.weight_version
            for version in self.alive()
            if version.state in PASSED and version.durable and (version.folder or version.weights_file is None)
        ]

    def learned(self, number: int) -> bool:
        version = self.do(self.ledger.version(number))
        return number > 0 if version.same_weights_as is None else self.learned(version.same_weights_as)

    # -- people

    @rule(n=st.integers(1, 3), session=st.sampled_from("abc"), is_judged=st.booleans())
    def people_talk_to_what_serves(self, n: int, session: str, is_judged: bool) -> None:
        serving = self.do(self.ledger.serving_version())
        for _ in range(n):
            name, self.named = f"t{self.named}", self.named + 1
            self.sampled_by[name] = serving
            self.sessions.setdefault(session, []).append(name)
            request, runs = make_request(name, user="u", session=session), (VersionRun(serving, 2),)
            self.do(serve_turn(self.ledger, request, make_turn(name, runs=runs)))
            self.waiting[name] = "served"
        if is_judged:
            self.people_answer_and_the_judge_votes()

    @rule()
    def people_answer_and_the_judge_votes(self) -> None:
        answer = NextState((Message(role="user", content="n"),))
        for name in self.waiting:
            self.do(self.ledger.pair(name, answer, by_request_id="x"))
            self.do(self.ledger.record_verdict(name, Verdict(1, (1,), "rules")))
        for judged in self.do(self.ledger.to_score(1000)):
            turn = judged.turn
            mask, log_probs = turn.loss_mask, turn.rollout_log_probs
            sample = Sample(turn.turn_id, (1, 2), turn.response_ids, mask, log_probs, turn.versions, 0.7, reward=1.0)
            self.do(self.ledger.record_sample(sample))
        self.waiting = {}

    @rule(session=st.sampled_from("abc"), rebuild=st.booleans())
    def a_user_deletes_a_session(self, session: str, rebuild: bool) -> None:
        names = self.sessions.pop(session, [])
        if not names:
            return
        forgotten = self.do(self.ledger.forget(session))
        for name in names:
            self.waiting.pop(name, None)
            del self.sampled_by[name]
            assert self.do(self.ledger.turn(name)) is None
        if rebuild:
            before = self.versions()
            try:
                to = self.do(self.ledger.rollback_from(forgotten.trained_in)).get(SHARED_POLICY)
            except LedgerError:
                assert self.versions() == before
            else:
                self._gone_back(to)

    # -- the trainer

    @rule(steps=st.sampled_from([2, 4, 8]))
    def training_goes_on(self, steps: int, durable: float = 0.4) -> None:
        """So that chains grow long in short runs too; people answer each version as it comes."""
        if steps:
            self.do(self.ledger.set_pin(None))
        for _ in range(steps):
            self.people_talk_to_what_serves(1, self.random.choice("abc"), True)
            self.a_step(is_durable=self.random.random() < durable, is_published=True)

    @rule(is_durable=st.booleans(), is_published=st.booleans())
    def a_step(self, is_durable: bool, is_published: bool) -> None:
        if self.lease is None:
            self.the_trainer_asks()
        if self.lease is None:
            return
        lease, self.lease = self.lease, None
        manifest = Manifest(folder=f"versions/full-{lease.fence}", kind=WeightKind.FULL, base_hash="base", sha256="")
        commit = Commit(
            lease_id=lease.lease_id,
            fence=lease.fence,
            parent=lease.parent,
            manifest=manifest,
            report=Report(metrics={}),
            durable=is_durable,
        )
        try:
            number = self.do(self.ledger.commit(commit))
        except CommitRefused:  # a session was forgotten, or a rollback came in between
            return
        self.fences[number] = lease.fence
        if is_published and self.do(self.ledger.pinned()) is None:
            for state in (VersionState.GATED, VersionState.LOADING, VersionState.SERVING):
                self.do(self.ledger.set_version_state(number, state))

    @rule()
    def the_trainer_asks(self) -> None:
        self.lease = self.do(self.ledger.lease(trainer="slime", now=True))

    @rule(is_released=st.booleans())
    def a_lease_ends_without_a_step(self, is_released: bool) -> None:
        if self.lease is None:
            return
        lease, self.lease = self.lease, None if is_released else self.lease
        if is_released:
            with suppress(CommitRefused):  # a session was forgotten, or a rollback came in between
                self.do(self.ledger.release(lease.lease_id, lease.fence, reason="out of memory"))
        else:  # its trainer does not know, and tries to commit
            self.do(self.ledger.revoke(reason="an operator's word"))

    @rule()
    def a_checkpoint(self) -> None:
        self.do(self.ledger.durable(self.do(self.ledger.tip()).weight_version))

    @rule(steps=st.sampled_from([0, 1, 3]), has_unsaid_checkpoint=st.booleans())
    def the_trainer_dies(self, steps: int, has_unsaid_checkpoint: bool) -> None:
        self.training_goes_on(steps, durable=0.0)
        before = self.alive()
        on_chain = [version.weight_version for version in before if version.weight_version in self.fences]
        said = self.random.choice(on_chain) if has_unsaid_checkpoint and on_chain else None
        whole = [] if said is None else [self.fences[said]]
        self.do(self.ledger.revoke(trainer="slime", reason="started again"))
        self.do(self.ledger.lose_undurable("started again", whole_fences=whole))
        self.lease = None
        alive = {version.weight_version for version in self.alive()}
        for version in before:
            assert version.weight_version in alive or not version.durable
        folder = said is not None and self.do(self.ledger.version(said)).folder
        assert said is None or said in alive or not folder

    @rule()
    def the_server_dies(self) -> None:
        self.do(self.ledger.aclose())
        self.ledger = self._open()

    # -- the operator, the monitor and the publisher

    @rule(requeue=st.booleans())
    def somebody_rolls_back(self, requeue: bool) -> None:
        to = self.random.choice(self.ways_back()[-3:])
        self.do(self.ledger.rollback(to, requeue=requeue))
        self._gone_back(to, gives_up=not requeue)

    @rule()
    def the_monitor_rolls_back(self) -> None:
        good = self.random.choice(self.alive()[-6:]).weight_version
        best = max(number for number in self.ways_back() if number <= good)
        if self.learned(good) and not self.learned(best):
            serving = self.do(self.ledger.serving_version())
            try:
                self.do(self.ledger.roll_back_behind(good))
            except LedgerError:
                assert self.do(self.ledger.serving_version()) == serving
            else:
                raise AssertionError("all that was learned was given up")
            return
        assert self.do(self.ledger.roll_back_behind(good)) == best
        self._gone_back(best, gives_up=True)

    def _gone_back(self, to: int | None, *, gives_up: bool = False) -> None:
        if to is not None:
            gone = {version.weight_version for version in self.versions() if version.weight_version > to}
            self.gone_back_from |= gone
            self.given_up |= gone if gives_up else set()

    @rule(is_on=st.booleans())
    def somebody_pins(self, is_on: bool) -> None:
        number = self.random.choice([*self.ways_back(), self.do(self.ledger.serving_version())])
        self.do(self.ledger.set_pin(number if is_on else None, serves=is_on))

    @rule()
    def the_publisher_prunes(self) -> None:
        before, weights, first = self.ways_back(), self.weights(), self.first_learned()
        for number in set(self.do(self.ledger.version_folders())) - self.do(self.ledger.needed_versions(KEPT)):
            self.do(self.ledger.prune_weights(number, KEPT))
        assert self.ways_back()[-KEPT:] == before[-KEPT:]
        assert self.weights()[-KEPT:] == weights[-KEPT:]
        assert self.first_learned() == first

    def weights(self) -> list[str | None]:
        """The distinct weights of the ways back, the newest last."""
        folders = [self.do(self.ledger.version(number)).folder for number in self.ways_back()]
        return list(dict.fromkeys(folders))

    def first_learned(self) -> int | None:
        return next(filter(self.learned, self.ways_back()), None)

    # -- what holds

    @invariant()
    def no_sample_goes_without_a_rollback_behind_it(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.do(self.ledger.audit()) == []
        turns = {turn.turn_id: turn for turn in self.do(self.ledger.turns(limit=10_000))}
        assert turns.keys() == self.sampled_by.keys()
        for name, turn in turns.items():
            if turn.state == "dropped":
                assert turn.reason == "rolled_back"
                assert self.sampled_by[name] in self.gone_back_from or self._trained_in(name) & self.given_up

    def _trained_in(self, name: str) -> set[int]:
        events = self.do(self.ledger.turn(name)).events
        return {int(event.detail.split()[-1]) for event in events if event.state == "trained"}

    @invariant()
    def a_pinned_version_serves(self) -> None:
        if hasattr(self, "ledger") and (pinned := self.do(self.ledger.pinned())) is not None:
            assert self.do(self.ledger.serving_version()) == pinned


Node.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNode = Node.TestCase

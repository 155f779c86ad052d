"""People, judge, driver, crashes, deletions and rollbacks of a node in random order, over the real loop and ledger.

A soak, which the suite does not collect: `scripts/test.sh tests/openclaw_slime/soak_interleavings.py`. The variable
OPENCLAW_INTERLEAVINGS sets the number of examples (12 take 20 s, 1,000 about 35 minutes).

A version's weights are the list of the samples that it was trained on (`toy_node`). After every call the ledger's audit
is clean, and a sample ends `rolled_back` only if a rollback abandoned the version that sampled or trained it. After
every start of a driver the engine serves the newest good version of which a whole checkpoint exists. In the end every
sample that was not forgotten or rolled back is in the serving weights, once.
"""

import json
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from pydantic import SecretStr
from toy_node import TOKEN, Killed, ToyMegatron, ToyServer

from openclaw_rl.backoff import Backoff
from openclaw_rl.errors import EngineError, LedgerError
from openclaw_rl.messages import Message
from openclaw_rl.trainers.client import LeaseSession
from openclaw_rl.types import (
    DropReason,
    NextState,
    Request,
    Sample,
    SamplingParams,
    Scope,
    Turn,
    TurnKey,
    TurnState,
    Verdict,
    Version,
    VersionRun,
    VersionState,
)
from openclaw_slime.checkpoints import Checkpoints, Due
from openclaw_slime.loop import NodeLoop, StartAgain
from openclaw_slime.node import TRAINER, NodeConfig

EXAMPLES = int(os.environ.get("OPENCLAW_INTERLEAVINGS", "12"))
DAYS = st.integers(0, 6)
POINTS = ["generate", "train", "trained", "push", "pushing", "pushed", "save", "saved"]
KEPT = 2
IDS, MASK, LOG_PROBS = (7, 8, 9), (True,) * 3, (-1.0,) * 3
GONE = (VersionState.ROLLED_BACK, VersionState.REJECTED)


def _no_report(*_: object) -> None:
    raise Killed("reported")


class NodeMachine(RuleBasedStateMachine):
    config: NodeConfig

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.server = ToyServer(Path(self._folder.name), max_staleness=10**6, keep_versions=KEPT)
        self.client = self.server.client()
        self.config = self.config.model_copy(update={"url": self.server.url})
        self.now = 0.0
        self.driver: NodeLoop | None = None
        self.megatron: ToyMegatron | None = None
        self.sampled_by: dict[str, int] = {}
        self.has_rolled = False
        self.unjudged: list[str] = []
        self.forgotten: set[str] = set()
        self.abandoned: set[str] = set()
        """Samples that a rollback without requeue may drop."""

    @initialize(every=st.integers(1, 4))
    def begin(self, every: int) -> None:
        self.checkpoints = Checkpoints(self.server.folder, every=every)

    # -- people and the judge

    @rule(n=st.integers(1, 3), is_judged=st.booleans())
    def people_chat(self, n: int, is_judged: bool) -> None:
        for _ in range(n):
            name = f"turn-{len(self.sampled_by):03d}"
            version = self.server.serving.current
            assert self._versions()[version].state not in GONE
            self.sampled_by[name] = version
            self._do(self._served(name, version))
            self.unjudged.append(name)
            if is_judged:
                self.judge_speaks()

    @rule()
    def judge_speaks(self) -> None:
        if self.unjudged:
            self._do(self._judged(self.unjudged.pop(0)))

    # -- the driver

    @rule(days=DAYS)
    def days_pass(self, days: int) -> None:
        """People answer what serves now, and the driver learns from it: nearly no sample is of an older version."""
        for _ in range(days):
            self.people_chat(2, True)
            self._turn()

    @rule()
    def driver_turns(self) -> None:
        self._turn()

    @rule(days=DAYS, point=st.sampled_from(POINTS), how=st.sampled_from(["dies_at", "fails_at"]))
    def driver_ends_at(self, days: int, point: str, how: str) -> None:
        """The process is killed there, or Ray raises, if the turn gets there."""
        self.days_pass(days)
        if self._is_running() and self.megatron is not None:
            setattr(self.megatron, how, point)
            self._until_it_ends()
        if self.megatron is not None:
            self.megatron.dies_at = self.megatron.fails_at = ""

    @rule(days=DAYS)
    def driver_is_killed_before_it_reports_a_checkpoint(self, days: int) -> None:
        """The checkpoint is whole on disk, and the server does not hear of it."""
        self.days_pass(days)
        if self._is_running():
            self.client.durable = _no_report  # type: ignore[method-assign]
            self._until_it_ends()
            del self.client.durable

    @rule(days=DAYS)
    def driver_is_killed_between_turns(self, days: int) -> None:
        self.days_pass(days)
        self.driver = self.megatron = None

    @rule()
    def driver_is_stopped(self) -> None:
        if self.driver is None:
            return
        self.driver._session.stop.set()
        with suppress(StartAgain):
            self.driver.run()
        self.driver = self.megatron = None

    # -- deletions and rollbacks

    @rule(data=st.data(), with_rebuild=st.booleans())
    def a_user_forgets(self, data: st.DataObject, with_rebuild: bool) -> None:
        if alive := [name for name in self.sampled_by if name not in self.forgotten]:
            trained = self._forget(data.draw(st.sampled_from(alive)))
            if with_rebuild:
                self._rebuild(trained)

    @rule(data=st.data(), days=DAYS, late=st.booleans())
    def a_user_forgets_in_a_step(self, data: st.DataObject, days: int, late: bool) -> None:
        """Before the weights change, or when they have changed and the commit is to come."""
        self.days_pass(days)
        self.people_chat(2, True)
        waiting = [name for name in self._alive() if self._state(name) is TurnState.SAMPLED]
        if not waiting or not self._is_running() or self.megatron is None:
            return
        name, megatron, real = data.draw(st.sampled_from(waiting)), self.megatron, self.megatron.at

        def at(point: str) -> None:
            if point == ("trained" if late else "generate"):
                megatron.at = real  # type: ignore[method-assign]
                self._forget(name)
            real(point)

        megatron.at = at  # type: ignore[method-assign]
        self._turn()
        megatron.at = real  # type: ignore[method-assign]

    @rule(data=st.data(), requeue=st.booleans())
    def operator_rolls_back(self, data: st.DataObject, requeue: bool) -> None:
        to = data.draw(st.sampled_from(sorted(self._versions())))
        self._rolled(self.server.ledger.rollback(to, requeue=requeue), requeue=requeue)

    @rule(data=st.data(), days=DAYS)
    def watch_rolls_back_behind(self, data: st.DataObject, days: int) -> None:
        self.days_pass(days)
        good, whole = data.draw(st.sampled_from(sorted(self._versions()))), self._whole()
        to = self._rolled(self.server.ledger.roll_back_behind(good))
        if to is not None:  # never below the newest good version that exists
            assert to >= max((number for number in whole if number <= good), default=0)

    # -- what holds

    @invariant()
    def the_audit_is_clean(self) -> None:
        assert self._do(self.server.ledger.audit()) == []

    @invariant()
    def the_newest_checkpoints_are_kept(self) -> None:
        versions = self._versions()
        if self.has_rolled:  # the newest of then are abandoned, and those before them were pruned rightly
            return
        dead = (*GONE, VersionState.LOST)

        def has_learned(version: Version) -> bool:
            while version.same_weights_as is not None:  # a new number for the weights that were left after a crash
                version = versions[version.same_weights_as]
            return version.lease_id is not None

        kept = sorted(n for n, v in versions.items() if v.durable and v.state not in dead and has_learned(v))
        for number in kept[-KEPT:]:
            folder = versions[number].folder
            assert folder is not None, number
            assert (self.server.folder / folder / "weights.json").is_file(), number

    @invariant()
    def nothing_is_rolled_back_that_nobody_rolled_back(self) -> None:
        for name in self._alive():
            record = self._do(self.server.ledger.turn(name))
            if record.state is TurnState.DROPPED:
                assert record.reason is DropReason.ROLLED_BACK, (name, record.reason)
                assert name in self.abandoned, name

    def teardown(self) -> None:
        try:
            while self.unjudged:
                self.judge_speaks()
            for _ in range(200):
                if not self._turn() and not self._do(self.server.ledger.counts()).get("sampled"):
                    break
            self.the_audit_is_clean()
            self.nothing_is_rolled_back_that_nobody_rolled_back()
            holds = Counter(name for name in self.server.engine.holds if name not in self.forgotten)
            expected = [name for name in self._alive() if self._state(name) is not TurnState.DROPPED]
            assert holds == Counter(expected)  # 0 lost, 0 twice
            serving = self._do(self.server.ledger.serving_version())
            tip = self._do(self.server.ledger.tip()).weight_version
            assert (self.server.serving.current, self.server.engine.weight_version, tip) == (serving,) * 3
        finally:
            self.server.close()
            self._folder.cleanup()

    # -- helpers

    def _do(self, work: Any) -> Any:
        return self.server.do(work)

    def _alive(self) -> list[str]:
        return [name for name in self.sampled_by if name not in self.forgotten]

    def _state(self, name: str) -> TurnState:
        return self._do(self.server.ledger.turn(name)).state

    def _running(self) -> NodeLoop:
        """Return the driver, started again if it has ended. After a start the best version that exists serves."""
        if self.driver is not None:
            return self.driver
        best = max(self._whole().values(), key=len, default=[])
        started = self.client.start(TRAINER, self.checkpoints.whole_fences())
        self.megatron = ToyMegatron(self.server, self.checkpoints, self.config, started.tip)
        session = LeaseSession(self.client, TRAINER, threading.Event(), wait_s=0.02, pauses=Backoff(0.01, 0.1))
        due = Due(self.checkpoints.every, clock=lambda: self.now)
        driver = NodeLoop(session, self.megatron.node(), self.config, self.checkpoints, started.tip, due=due)
        driver._meet_engine()
        assert set(best) <= set(self.server.engine.holds)
        self.driver = driver
        return driver

    def _until_it_ends(self) -> None:
        """Let days pass until the driver ends, or until a checkpoint has been due."""
        for _ in range(self.checkpoints.every):
            self.people_chat(2, True)
            self._turn()
            if self.driver is None:
                return

    def _is_running(self) -> bool:
        """Start the driver if it has ended. Return False if the start ended it again."""
        try:
            self._running()
        except StartAgain:
            self.driver = self.megatron = None
        return self.driver is not None

    def _turn(self) -> bool:
        """Let the driver make a turn; start it again first if it has ended. Return True if it made a step or ended."""
        self.now += 100  # a checkpoint that failed may be tried again
        try:
            driver = self._running()
            return driver.turn() is not None
        except (Killed, StartAgain, RuntimeError):
            self.driver = self.megatron = None
            return True

    def _forget(self, name: str) -> tuple[int, ...]:
        """Delete the sample's session. Return the versions that were trained on it."""
        done = self._do(self.server.ledger.forget(f"s-{name}"))
        self.forgotten.add(name)
        self.unjudged = [other for other in self.unjudged if other != name]
        return tuple(done.trained_in)

    def _rebuild(self, trained: tuple[int, ...]) -> None:
        if not trained:
            return
        self._rolled(self.server.ledger.rollback_from(trained), requeue=True)
        for folder in self._do(self.server.ledger.drop_weights(min(trained) - 1)):
            shutil.rmtree(self.server.folder / folder, ignore_errors=True)

    def _rolled(self, call: Coroutine[Any, Any, Any], *, requeue: bool = False) -> Any:
        """Carry out a rollback, and note the samples that it may drop. Return its result; None if it was refused."""
        trained = {name: self._do(self.server.ledger.turn(name)).trained_in for name in self._alive()}
        try:
            done = self._do(call)
        except LedgerError:
            return None
        self.has_rolled = True
        rolled = {n for n, version in self._versions().items() if version.state is VersionState.ROLLED_BACK}
        self.abandoned |= {name for name in trained if self.sampled_by[name] in rolled}
        self.abandoned |= {name for name, number in trained.items() if number in rolled and not requeue}
        with suppress(EngineError, TimeoutError):  # the publisher tries again when the weights are there
            self._do(self.server.publisher.follow())
        return done

    def _versions(self) -> dict[int, Version]:
        return {version.weight_version: version for version in self._do(self.server.ledger.versions())}

    def _whole(self) -> dict[int, list[str]]:
        """Return the weights of the versions whose checkpoint is whole on disk and which were not abandoned."""
        folders = {self.checkpoints.folder(fence) for fence in self.checkpoints.whole_fences()}
        return {
            number: json.loads((self.server.folder / version.folder / "weights.json").read_text())
            for number, version in self._versions().items()
            if version.folder in folders and version.state not in GONE
        }

    async def _served(self, name: str, version: int) -> None:
        ledger, message, reply = self.server.ledger, Message(role="user", content="q"), Message(role="assistant")
        scope, params = Scope("u", f"s-{name}"), SamplingParams(max_new_tokens=8)
        await ledger.begin(Request(name, scope, 0.0, (message,), None, None, (1, 5), params))
        turn = Turn(name, name, 0.0, IDS, LOG_PROBS, MASK, (VersionRun(version, 3),), "stop", reply)
        await ledger.finish(turn, TurnKey("r", "b", "h"))

    async def _judged(self, name: str) -> None:
        ledger, runs = self.server.ledger, (VersionRun(self.sampled_by[name], 3),)
        await ledger.pair(name, NextState((Message(role="user", content="q"),)), by_request_id=name)
        await ledger.record_verdict(name, Verdict(1, (1,), "rules"))
        await ledger.record_sample(Sample(name, (1, 5), IDS, MASK, LOG_PROBS, runs, 0.7, reward=1.0))


def test_random_interleavings_lose_nothing_and_repeat_nothing(node_config: Callable[..., NodeConfig]) -> None:
    class Machine(NodeMachine):
        config = node_config("combine").model_copy(update={"token": SecretStr(TOKEN)})

    phases = [Phase.explicit, Phase.reuse, Phase.generate]  # a shrink would take minutes
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    how = settings(
        max_examples=EXAMPLES, stateful_step_count=8, deadline=None, phases=phases, suppress_health_check=checks
    )
    run_state_machine_as_test(Machine, settings=how)

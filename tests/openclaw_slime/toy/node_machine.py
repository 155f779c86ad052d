"""People, a judge, an operator and a driver around a toy node, with crashes at any point, as moves of a random walk.

A version's weights are the list of the samples that it was trained on (`toy_node`). The node's moves do to the ledger
what routes, monitor and launcher do. The checks compare the ledger with the files, the engine and Megatron.
"""

import random
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from toy_node import Killed, ToyMegatron, ToyServer
from toy_records import Records

from openclaw_rl.backoff import Backoff
from openclaw_rl.errors import EngineError, LedgerError
from openclaw_rl.ledger.states import PASSED
from openclaw_rl.trainers.client import LeaseSession, ServerGone, TrainerClient
from openclaw_rl.types import DropReason, TurnState, VersionState
from openclaw_slime.checkpoints import Checkpoints, Due
from openclaw_slime.loop import NodeLoop, StartAgain
from openclaw_slime.node import TRAINER, NodeConfig

KEPT = 2
MOST_CALLS = 500
STEP_S = 100.0
"""The clock's advance in a turn: a checkpoint that failed may be tried again."""
FAST = Path("/dev/shm")
IN_SLIME = ("generate", "train", "computed", "trained", "push", "pushing", "pushed", "save", "saved")
CALLS = ("start", "tip", "lease", "leased", "renew", "commit", "durable", "push/begin", "push/end")
POINTS = (*IN_SLIME, *(f"{when} {call}" for call in CALLS for when in ("before", "after")))
"""Points of an event while the driver works: in slime, or before a call is sent or its answer is read."""


class WatchedClient(TrainerClient):
    at: Callable[[str], None] = staticmethod(lambda point: None)

    def _post(self, verb: str, body: BaseModel | None, *, extra_s: float = 0.0) -> bytes:
        self.at(f"before {verb}")
        answer = super()._post(verb, body, extra_s=extra_s)
        self.at(f"after {verb}")
        return answer


class Node:
    """One toy node. `happen` does what EVENTS names at once, `until_it_happens` when the driver comes to a point."""

    def __init__(self, config: NodeConfig, seed: int, *, every: int, every_s: float, tally: Counter[str]) -> None:
        self.random, self.tally = random.Random(seed), tally
        self._place = tempfile.TemporaryDirectory(dir=FAST if FAST.is_dir() else None)
        folder = Path(self._place.name)
        self.server = ToyServer(folder, max_staleness=10**6, keep_versions=KEPT, has_port=False)
        self.client = self.server.client(WatchedClient)
        self.client.at = self._at
        self.config = config.model_copy(update={"url": self.server.url})
        self.checkpoints, self._every_s, self.now = Checkpoints(folder, every=every), every_s, 0.0
        self.records = Records(self.server, self.checkpoints)
        self.driver: NodeLoop | None = None
        self.megatron: ToyMegatron | None = None
        self.plan: tuple[str, str] | None = None
        self._is_calm = True
        """Nothing has happened since the driver's turn began."""
        self._calls = 0
        self._is_in_turn = False
        self._has_lost_engine = False
        """The engine died, and no driver has met it since."""
        self._later: list[Future[Any]] = []
        """Calls of the operator that wait for a push to end."""
        self.unjudged: list[str] = []
        self.abandoned: set[str] = set()
        """Samples that a rollback without requeue may drop."""
        self.newest_when_rolled = 0

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.server.do(work)

    def close(self) -> None:
        self.server.close()
        self._place.cleanup()

    # -- people and the judge

    def people_chat(self, n: int, *, is_judged: bool = True) -> None:
        """They wait while chats are held."""
        if not self.server.serving.is_open:
            return
        for _ in range(n):
            self.unjudged.append(self.records.serve())
            if is_judged:
                self.judge_speaks()

    def judge_speaks(self) -> None:
        if self.unjudged:
            self.records.judge(self.unjudged.pop(0))

    # -- the driver

    def days_pass(self, days: int) -> None:
        """People answer what serves now, and the driver learns from it: nearly no sample is of an older version."""
        for _ in range(days):
            self.people_chat(2)
            self.turn()

    def until_it_happens(self, point: str, what: str) -> None:
        """Let days pass until the driver comes to the point; a checkpoint is due meanwhile."""
        self.plan = (point, what)
        for _ in range(self.checkpoints.every + 1):
            if self.plan is not None:
                self.days_pass(1)
        self.plan = None

    def turn(self) -> bool:
        """Let the driver make a turn; start it first if it has ended. Return True unless it was idle."""
        self.now += STEP_S
        self._is_calm, self._calls = True, 0
        try:
            driver = self._running()
            version = driver.turn()
            if self._is_calm:
                self._check_turn(driver, version)
            return version is not None or not self._is_calm
        except ServerGone:  # the process goes on, and repeats its turn
            return True
        except (Killed, StartAgain, RuntimeError):
            self.driver = self.megatron = None
            return True
        finally:
            self._end_calls()

    def stop_driver(self) -> None:
        if self.driver is None:
            return
        self.driver._session.stop.set()
        with suppress(StartAgain):
            self.driver.run()
        self.driver = self.megatron = None

    def _running(self) -> NodeLoop:
        """Return the driver, started again if it has ended. After a start the best version that exists serves."""
        if self.driver is not None:
            return self.driver
        self.tally["driver starts"] += 1
        best = self.records.best_on_disk()
        started = self.client.start(TRAINER, self.checkpoints.whole_fences())
        self.megatron = megatron = ToyMegatron(
            self.server, self.checkpoints, self.config, started.tip, client=self.client
        )
        megatron.at = self._at  # type: ignore[method-assign]
        session = LeaseSession(self.client, TRAINER, threading.Event(), wait_s=0.02, pauses=Backoff(0.001, 0.01))
        due = Due(self.checkpoints.every, self._every_s, clock=lambda: self.now)
        self.driver = driver = NodeLoop(session, megatron.node(), self.config, self.checkpoints, started.tip, due=due)
        if self._is_calm:
            assert set(best) <= set(megatron.weights)
        session.when_server_answers(driver._meet_engine)
        serves = self.server.engine.holds == megatron.weights
        if self._is_calm and self.do(self.server.ledger.pinned()) is None:
            assert serves or self._has_lost_engine  # which the push has found out: it starts once more
        self._has_lost_engine &= not serves
        return driver

    # -- what may happen

    def happen(self, what: str) -> None:
        self.tally[what] += 1
        self._is_calm = False
        EVENTS[what](self)
        self._end_calls()

    def _at(self, point: str) -> None:
        self._calls += 1
        if self._calls > MOST_CALLS:
            self.server.hung.append(f"{self._calls} calls in one turn, the last {point}")
            raise Killed("hangs")
        if self.plan is None or self.plan[0] != point:
            return
        (_, what), self.plan = self.plan, None
        self._is_calm = False
        if what in ("killed", "fails"):
            self.tally[f"{what} {point}"] += 1
        if what == "killed":
            raise Killed(point)
        if what == "fails":
            raise RuntimeError(f"{point} failed") if point in IN_SLIME else ServerGone(f"away {point}")
        self.tally[f"{what} in a turn"] += 1
        self._is_in_turn = True
        EVENTS[what](self)
        self._is_in_turn = False

    def _killed(self) -> None:
        self.driver = self.megatron = None

    def _forget(self) -> tuple[int, ...]:
        """Delete a session; rather one whose sample waits or is leased. Return the versions trained on it."""
        alive = self.records.states()
        names = [name for name, state in alive.items() if state in (TurnState.LEASED, TurnState.SAMPLED)]
        if not alive:
            return ()
        name = self.random.choice(names if names and self.random.random() < 0.7 else list(alive))
        self.unjudged = [other for other in self.unjudged if other != name]
        if self._is_in_turn and self.random.random() < 0.5:  # the deletion may wait for the step's commit
            self._later.append(self.server.later(self.records.forget(name)))
            return ()
        return self.do(self.records.forget(name))

    def _forget_and_rebuild(self) -> None:
        trained = self._forget()
        if not trained:
            return
        self._rolled(self.server.ledger.rollback_from(trained), requeue=True)
        for folder in self.do(self.server.ledger.drop_weights(min(trained) - 1)):
            shutil.rmtree(self.server.folder / folder, ignore_errors=True)

    def _revoke(self) -> None:
        self.do(self.server.ledger.revoke(trainer=None, reason="its deadline passed"))

    def _roll_back(self) -> None:
        """The operator names a version; one that exists, or any."""
        self._settle()
        named = self.records.existing() if self.random.random() < 0.8 else self.records.versions()
        to, requeue = self.random.choice(sorted(named)), self.random.random() < 0.5
        exists = to in self.records.existing()
        done = self._rolled(self.server.ledger.rollback(to, requeue=requeue), requeue=requeue)
        assert (done is not None) == exists

    def _watch_rolls_back(self) -> None:
        """Never below the newest good version that exists, and not to the base while something was learned."""
        if self.do(self.server.ledger.pinned()) is not None:  # the operator decides alone
            return
        self._settle()
        good = self.random.choice(sorted(self.records.versions())[-8:])
        best = max(number for number in self.records.existing() if number <= good)
        gives_all_up = self.records.has_learned(good) and not self.records.has_learned(best)
        assert self._rolled(self.server.ledger.roll_back_behind(good)) == (None if gives_all_up else best)

    def _pin(self) -> None:
        serving = self.do(self.server.ledger.serving_version())
        number = self.random.choice([serving, *self.records.existing()])
        self._later.append(self.server.later(self.server.publisher.pin(number)))

    def _unpin(self) -> None:
        self._later.append(self.server.later(self.server.publisher.pin(None)))

    def _server_dies(self) -> None:
        for call in self._later:
            call.cancel()
        self._later.clear()
        self.server.restart()
        self._has_lost_engine = True

    def _engine_dies(self) -> None:
        self.server.engine.restart()
        self._has_lost_engine = True
        if self.random.random() < 0.5:  # it is the server's child, and its end was seen
            self.server.later(_call(self.server.serving.hold))

    def _rolled(self, call: Coroutine[Any, Any, Any], *, requeue: bool = False) -> Any:
        """Carry out a rollback, and note the samples that it may drop. Return its result; None if it was refused."""
        trained = {turn.turn_id: turn.trained_in for turn in self.records.turns()}
        try:
            done = self.do(call)
        except LedgerError:
            return None
        if done is None or done == {}:
            return None
        versions = self.records.versions()
        self.newest_when_rolled = max(versions)
        rolled = {number for number, version in versions.items() if version.state is VersionState.ROLLED_BACK}
        self.abandoned |= {name for name in trained if self.records.sampled_by[name] in rolled}
        self.abandoned |= {name for name, number in trained.items() if number in rolled and not requeue}
        self._later.append(self.server.later(self.server.publisher.follow()))
        return done

    def _end_calls(self) -> None:
        """Wait for the operator's calls. The push of a driver that is gone goes first: its deadline passes."""
        if self.driver is None and self._later:
            self.do(_call(self.server.publisher.pushes.give_up, "its deadline passed"))
        for call in self._later:
            with suppress(LedgerError, EngineError):  # refused; or the engine is away, and the publisher tries again
                self.server.result(call)
        self._later.clear()

    def _settle(self) -> None:
        """Let the publisher serve and prune what it would within a moment, unless a push goes first."""
        publisher = self.server.publisher

        async def settle() -> None:
            with suppress(EngineError):
                await publisher.follow()
                while await publisher._publish_next():
                    pass
                await publisher._serve_tip()
            await publisher._prune()

        if self.driver is None:
            self.do(_call(publisher.pushes.give_up, "its deadline passed"))
        if self.driver is None or publisher.pushes._now is None:
            self.do(settle())

    # -- what holds

    def check(self) -> None:
        """Check the invariants that hold at any moment between two turns."""
        assert not self.server.hung, self.server.hung
        self._settle()
        assert self.do(self.server.ledger.audit()) == []
        for turn in self.records.turns():
            if turn.state is TurnState.DROPPED:
                assert turn.reason is DropReason.ROLLED_BACK, (turn.turn_id, turn.reason)
                assert turn.turn_id in self.abandoned, turn.turn_id
        versions, weights = self.records.snapshot()  # the ledger names no weights that do not exist
        since = [
            number
            for number, version in versions.items()
            if number > self.newest_when_rolled and version.durable and version.state in PASSED and version.lease_id
        ]
        for number in since[-KEPT:]:  # copies of one checkpoint fill no place
            assert number in weights, number
        if self.server.serving.is_open:
            assert max(Counter(self.server.engine.holds).values(), default=1) == 1
            pinned = self.do(self.server.ledger.pinned())
            assert pinned in (None, self.server.serving.current)

    def _check_turn(self, driver: NodeLoop, version: int | None) -> None:
        """Nothing has disturbed the turn: Megatron holds what the ledger calls trained, and it serves."""
        assert self.megatron is not None
        trained = [name for name, state in self.records.states().items() if state is TurnState.TRAINED]
        assert Counter(self.records.not_forgotten(self.megatron.weights)) == Counter(trained)
        if version is None or self._has_lost_engine:
            return
        if self.do(self.server.ledger.pinned()) is None:
            assert (self.server.serving.current, self.server.engine.weight_version) == (version, version)
            assert self.server.engine.holds == self.megatron.weights

    def finish(self) -> None:
        """Learn from all that waits; then each sample is in the serving weights once, if nobody took it away."""
        self.plan = None
        self.happen("unpin")
        self._end_calls()
        while self.unjudged:
            self.judge_speaks()
        for _ in range(200):
            if not self.turn() and not self.do(self.server.ledger.counts())["sampled"]:
                break
        self.check()
        expected = [name for name, state in self.records.states().items() if state is not TurnState.DROPPED]
        assert Counter(self.records.not_forgotten(self.server.engine.holds)) == Counter(expected)  # 0 lost, 0 twice
        serving = self.do(self.server.ledger.serving_version())
        tip = self.do(self.server.ledger.tip()).weight_version
        assert (self.server.serving.current, self.server.engine.weight_version, tip) == (serving,) * 3
        self.tally.update(examples=1, versions=len(self.records.versions()) - 1, samples=len(self.records.sampled_by))
        self.tally.update(f"versions {version.state}" for version in self.records.versions().values())


async def _call(function: Callable[..., object], *arguments: object) -> None:
    function(*arguments)


EVENTS: dict[str, Callable[[Node], object]] = {
    "killed": Node._killed,
    "forget": Node._forget,
    "forget and rebuild": Node._forget_and_rebuild,
    "revoke": Node._revoke,
    "roll back": Node._roll_back,
    "watch": Node._watch_rolls_back,
    "pin": Node._pin,
    "unpin": Node._unpin,
    "server dies": Node._server_dies,
    "engine dies": Node._engine_dies,
}

"""The driver's loop over the real trainer API, ledger and publisher.

Killed or failing at every point, it starts again; in the end every sample is in the serving weights once.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr
from toy_node import Killed, ToyMegatron, ToyServer

from openclaw_rl.backoff import Backoff
from openclaw_rl.trainer_protocol import Commit, LeaseBody, Tip
from openclaw_rl.trainers.client import LeaseSession, ServerGone
from openclaw_rl.types import TurnState, Version, VersionState, WeightKind
from openclaw_slime import checkpoints
from openclaw_slime.checkpoints import Checkpoints, Due
from openclaw_slime.loop import NodeLoop, StartAgain
from openclaw_slime.node import TRAINER, NodeConfig
from openclaw_slime.outcome import RankShare, merged
from openclaw_slime.rollout import Extras


class Run:
    """Starts drivers on one data directory until the work is done."""

    def __init__(self, server: ToyServer, config: NodeConfig, *, every: int) -> None:
        self.server, self.config = server, config
        self.checkpoints = Checkpoints(server.folder, every=every)
        self.client = server.client()
        self.starts = 0
        self.now = 0.0
        """The clock by which a checkpoint that failed is tried again."""
        self.hung = threading.Event()

    def start(self) -> tuple[NodeLoop, ToyMegatron]:
        self.starts += 1
        started = self.client.start(TRAINER, self.checkpoints.whole_fences())
        megatron = ToyMegatron(self.server, self.checkpoints, self.config, started.tip)
        session = LeaseSession(
            self.client,
            TRAINER,
            threading.Event(),
            wait_s=0.2,
            pauses=Backoff(0.01, 0.1),
            on_hang=self.hung.set,
        )
        due = Due(self.checkpoints.every, clock=lambda: self.now)
        driver = NodeLoop(session, megatron.node(), self.config, self.checkpoints, started.tip, due=due)
        driver._meet_engine()
        return driver, megatron

    def finish(self, driver: NodeLoop | None = None) -> None:
        """Turn until no sample waits; start a driver again when it asks for it."""
        driver = driver or self.start()[0]
        while True:
            try:
                if driver.turn() is None and not self.counts().get("sampled"):
                    driver._save()
                    return
            except StartAgain:
                driver, _ = self.start()

    def counts(self) -> dict[str, int]:
        return self.server.do(self.server.ledger.counts())

    def samples(self, n: int) -> list[str]:
        return [self.server.do(self.server.sample(self.server.serving.current)) for _ in range(n)]

    def check(self, samples: list[str]) -> None:
        """Every sample is in the weights that serve, once, and the ledger says so too."""
        ledger, engine = self.server.ledger, self.server.engine
        assert sorted(engine.holds) == sorted(samples)
        serving = self.server.do(ledger.serving_version())
        assert (self.server.serving.current, engine.weight_version) == (serving, serving)
        assert self.server.do(ledger.audit()) == []
        for name in samples:
            assert self.server.do(ledger.turn(name)).state is TurnState.TRAINED


@pytest.fixture
def run(tmp_path: Path, node_config: Callable[..., NodeConfig]) -> Iterator[Run]:
    server = ToyServer(tmp_path)
    config = node_config("combine").model_copy(update={"url": server.url, "token": SecretStr("trainer-token")})
    yield Run(server, config, every=2)
    server.close()


def test_updates_are_pushed_at_once_and_checkpointed_now_and_then(run: Run) -> None:
    samples = run.samples(7)
    run.finish()
    run.check(samples)  # the last batch was of one, and a filler
    versions = run.server.do(run.server.ledger.versions())
    assert [v.weight_version for v in versions if v.durable] == [0, 2, 4]
    assert [v.state for v in versions[:-1]] == [VersionState.RETIRED] * 4
    assert len(list(run.checkpoints.megatron.glob("iter_*"))) == 2
    assert run.starts == 1


POINTS = ["generate", "train", "trained", "push", "pushing", "pushed", "save", "saved"]


@pytest.mark.parametrize("point", POINTS)
def test_feedback_on_replies_of_versions_that_are_lost_is_learned_from(run: Run, point: str) -> None:
    """As people do: two replies of the version that serves, a step, two replies of the next one; then a kill."""
    names: list[str] = []
    driver, megatron = run.start()
    for _ in range(5):  # a checkpoint every two
        names += run.samples(2)
        driver.turn()
    names += run.samples(2)
    megatron.dies_at = point
    with pytest.raises(Killed):
        turn_and_save(driver)
    names += run.samples(2) if run.server.serving.is_open else []
    run.finish()
    run.check(names)


def test_a_lease_that_is_revoked_before_its_step_is_a_step_left_out(run: Run) -> None:
    """As by `forget` of one of its samples, at each point before the weights can change."""
    samples = run.samples(4)
    driver, megatron = run.start()

    def revoke() -> None:
        run.server.do(run.server.ledger.revoke(trainer=None, reason="a sample was deleted"))

    real = megatron._batches.batch
    for is_late in (False, True):

        def batch(fence: int, is_late: bool = is_late) -> list[Extras]:
            if not is_late:
                revoke()
            rows = real(fence)
            revoke()
            return rows

        megatron._batches.batch = batch  # type: ignore[method-assign]
        assert driver.turn() is None
        assert megatron.weights == []
    megatron._batches.batch = real  # type: ignore[method-assign]
    run.finish(driver)
    run.check(samples)
    assert run.starts == 1


def test_a_checkpoint_whose_report_met_no_server_is_found_by_the_next_start(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies, the driver ends after it, and both start again."""
    names: list[str] = []
    driver, _ = run.start()
    for _ in range(3):
        names += run.samples(2)
        driver.turn()
    waiting = run.samples(2)  # of a version that no checkpoint before this one holds

    def away(*_: object) -> None:
        raise ServerGone("away")

    with monkeypatch.context() as patch:
        patch.setattr(run.client, "durable", away)
        driver._session.stop.set()
        driver.run()
    assert run.checkpoints.whole_fences()[-1] == driver._fence
    run.finish()
    run.check(names + waiting)
    assert not any(v.state is VersionState.LOST for v in run.server.do(run.server.ledger.versions()))


def test_a_checkpoint_that_is_on_disk_is_not_written_again_to_report_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.samples(4)
    driver, _ = run.start()
    real, answers = run.client.durable, [ServerGone("away")]

    def durable(*given: Any) -> None:
        if answers:
            raise answers.pop()
        real(*given)

    monkeypatch.setattr(run.client, "durable", durable)
    driver.turn()
    with pytest.raises(ServerGone):
        driver.turn()
    turns(driver, 1)
    assert run.server.do(run.server.ledger.version(2)).durable


def test_a_rollback_while_a_checkpoint_is_written_starts_the_driver_again(run: Run) -> None:
    samples = run.samples(4)
    driver, megatron = run.start()
    driver.turn()

    def roll_back(point: str) -> None:
        if point == "save":
            run.server.do(run.server.ledger.rollback(0, requeue=True))

    megatron.at = roll_back  # type: ignore[method-assign]
    with pytest.raises(StartAgain, match="version 2 was abandoned while it was written"):
        driver.turn()
    assert not list(run.checkpoints.megatron.glob("iter_*"))  # nobody can go back to it
    run.finish()
    run.check(samples)


def test_a_checkpoint_without_its_mark_is_half_a_checkpoint(run: Run) -> None:
    run.samples(4)
    driver, megatron = run.start()
    driver.turn()
    megatron.dies_at = "saved"
    with pytest.raises(Killed):
        driver.turn()
    assert len(list(run.checkpoints.megatron.glob("iter_*"))) == 1
    assert run.checkpoints.whole_fences() == []


def test_every_file_of_a_checkpoint_is_flushed_before_it_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.samples(4)
    driver, _ = run.start()
    flushed: list[str] = []
    real = run.client.durable

    def durable(*given: Any) -> None:
        flushed.append("reported")
        real(*given)

    monkeypatch.setattr(checkpoints, "_flush", lambda place: flushed.append(place.name))
    monkeypatch.setattr(run.client, "durable", durable)
    turns(driver, 2)
    assert flushed.count("weights.json") == 2
    mark = next(name for name in flushed if name.startswith("whole_"))
    assert flushed.index("weights.json") < flushed.index(mark) < flushed.index("reported")
    assert {"megatron", "versions"} <= set(flushed)


def test_a_checkpoint_is_due_by_time_as_well_as_by_steps() -> None:
    now = 0.0
    due = Due(20, 120, clock=lambda: now)
    now = 500.0
    assert not due.is_now  # no step is missing on disk
    due.stepped()
    now = 619.0
    due.stepped()
    assert not due.is_now
    now = 620.0
    assert due.is_now
    due.kept()
    due.stepped()
    assert not due.is_now


def test_a_checkpoint_that_hangs_ends_the_process_with_its_reason(run: Run) -> None:
    run.samples(4)
    driver, megatron = run.start()
    driver.turn()
    driver.save_timeout_s = 0.2
    megatron.save_model = lambda *_, **__: run.hung.wait(60)  # type: ignore[assignment,method-assign]
    driver.turn()
    assert run.hung.is_set()
    assert run.server.health.failures["trainer"] == 1


def turn_and_save(driver: NodeLoop) -> None:
    driver.turn()
    driver._save()


def turns(driver: NodeLoop, n: int) -> None:
    for _ in range(n):
        driver.turn()


@pytest.mark.parametrize(
    ("how", "point"), [("killed", point) for point in POINTS] + [("fails", point) for point in POINTS[:-2]]
)
def test_a_driver_that_ends_anywhere_loses_and_repeats_nothing(run: Run, point: str, how: str) -> None:
    samples = run.samples(8)
    driver, megatron = run.start()
    driver.turn()
    driver.turn()  # two versions, the second durable
    driver.turn()  # a third, which is not
    megatron.dies_at, megatron.fails_at = (point, "") if how == "killed" else ("", point)
    with pytest.raises((Killed, StartAgain, RuntimeError)):
        driver.turn()
    run.finish()
    run.check(samples)
    lost = [v for v in run.server.do(run.server.ledger.versions()) if v.state is VersionState.LOST]
    assert len(lost) == (1 if point in ("generate", "train", "trained") else 2)


@pytest.mark.parametrize("point", POINTS[:-2])
def test_feedback_that_comes_between_the_steps_waits_again_after_a_crash(run: Run, point: str) -> None:
    """People answer what serves now: nearly all samples are of versions that the crash loses."""
    run.checkpoints = replace(run.checkpoints, every=100)
    samples, (driver, megatron) = [], run.start()
    for _ in range(6):
        samples += run.samples(2)
        driver.turn()
    samples += run.samples(2)
    megatron.dies_at = point
    with pytest.raises(Killed):
        driver.turn()
    samples += run.samples(2)
    run.finish()
    run.check(samples)


def test_steps_that_fail_again_and_again_are_a_problem_until_one_is_committed(run: Run) -> None:
    """Each time the driver starts again, as `launch` has it."""
    run.samples(2)
    for times in range(1, 4):
        driver, megatron = run.start()
        megatron.fails_at = "train"
        with pytest.raises(StartAgain):
            driver.turn()
        assert run.server.health.failures["trainer"] == times
    assert run.server.health.problems() == ["trainer: failed 3 times in a row, last: RuntimeError: train failed"]
    run.finish()
    assert run.server.health.problems() == []


def test_weights_that_were_not_sent_and_a_step_that_is_not_finite_are_told(run: Run) -> None:
    samples = run.samples(4)
    driver, megatron = run.start()
    megatron.not_finite = (samples[0],)
    assert driver.turn() is None
    assert run.server.health.failures["trainer"] == 1
    megatron.not_finite, megatron.fails_at = (), "pushing"
    with pytest.raises(StartAgain):
        driver.turn()
    assert run.server.health.failures["trainer"] == 2
    run.finish()
    run.check(samples[1:])


@pytest.mark.parametrize("point", ["save", "saved"])
def test_a_checkpoint_that_fails_is_told_and_tried_again_while_training_goes_on(run: Run, point: str) -> None:
    samples = run.samples(8)
    driver, megatron = run.start()
    megatron.fails_at = point
    turns(driver, 2)
    said = f"checkpoints: failed once: the trainer cannot keep checkpoints: RuntimeError: {point} failed"
    assert run.server.health.problems() == [said]
    turns(driver, 2)  # before its pause is over it is not tried
    assert run.server.health.failures["checkpoints"] == 1
    ledger = run.server.ledger
    assert [v.durable for v in sorted(run.server.do(ledger.versions()), key=number)] == [True] + 4 * [False]
    assert not list(run.checkpoints.megatron.glob("iter_*"))  # no half of one is left
    megatron.fails_at, run.now = "", 31.0
    samples += run.samples(2)
    driver.turn()
    assert run.server.health.problems() == []
    assert run.server.do(ledger.version(4)).durable
    run.finish(driver)
    run.check(samples)
    assert run.starts == 1
    assert not any(v.state is VersionState.LOST for v in run.server.do(ledger.versions()))


def number(version: Version) -> int:
    return version.weight_version


def test_no_more_is_learned_than_a_crash_may_cost_while_no_checkpoint_can_be_kept(run: Run) -> None:
    samples, (driver, megatron) = [], run.start()
    megatron.fails_at = "save"
    for _ in range(12):
        samples += run.samples(2)
        driver.turn()
    assert tip(run) == 10  # five times two steps
    run.now = 31.0
    turns(driver, 2)
    assert run.server.health.failures["checkpoints"] == 2
    assert tip(run) == 10
    megatron.fails_at, run.now = "", 31.0 + 61.0
    driver.turn()
    assert run.server.do(run.server.ledger.version(10)).durable
    run.finish(driver)
    run.check(samples)


def tip(run: Run) -> int:
    return run.server.do(run.server.ledger.tip()).weight_version


def test_pauses_between_checkpoints_that_fail_grow_to_ten_minutes() -> None:
    now = 0.0
    due = Due(1, clock=lambda: now)
    assert not due.is_now
    due.stepped()
    assert due.is_now
    pauses = [due.failed() for _ in range(7)]
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    now = 599.0
    assert not due.is_now
    now = 600.0
    assert due.is_now
    due.kept()
    assert not due.is_now
    assert due.failed() == 30


def test_a_step_that_hangs_is_told_from_one_that_is_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both outlive their lease; in the long one the ranks say now and then that they get on."""
    run.samples(2)
    real, beats = run.client.lease, 0

    def short(*args: Any, **kwargs: Any) -> LeaseBody | None:
        lease = real(*args, **kwargs)
        return None if lease is None else lease.model_copy(update={"lease_s": 0.6})

    monkeypatch.setattr(run.client, "lease", short)

    def a_long_step(refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        nonlocal beats
        beats += 1
        return ([], refs) if beats % 40 and not run.hung.wait(0.05) else (refs, [])

    driver, _ = run.start()
    node = driver._node
    node._ray = SimpleNamespace(get=lambda value, timeout=None: value, wait=a_long_step)  # type: ignore[attr-defined]
    node._heart = SimpleNamespace(count=SimpleNamespace(remote=lambda: beats))  # type: ignore[attr-defined]
    assert driver.turn() == 1  # two seconds, and more for the commit
    assert not run.hung.is_set()
    run.samples(2)
    node._heart = SimpleNamespace(count=SimpleNamespace(remote=lambda: 0))  # type: ignore[attr-defined]
    node._beats = 0  # type: ignore[attr-defined]
    with pytest.raises(StartAgain, match="is over"):
        driver.turn()
    assert run.hung.is_set()


def test_a_commit_that_was_not_answered_is_lost_with_the_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = run.samples(4)
    driver, _ = run.start()
    real = run.client.commit

    def commit_and_die(body: Commit) -> int:
        real(body)
        raise Killed("commit")

    with monkeypatch.context() as patch:
        patch.setattr(run.client, "commit", commit_and_die)
        with pytest.raises(Killed):
            driver.turn()
    run.finish()
    run.check(samples)


def test_a_server_that_is_away_when_a_step_is_to_be_committed_is_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = run.samples(2)
    driver, _ = run.start()
    real, answers = run.client.commit, [ServerGone("away"), ServerGone("away")]

    def commit(body: Commit) -> int:
        if answers:
            raise answers.pop()
        return real(body)

    monkeypatch.setattr(run.client, "commit", commit)
    assert driver.turn() == 1
    run.finish()
    run.check(samples)
    assert run.starts == 2


def test_a_sample_that_is_not_finite_is_dropped_and_the_rest_is_trained(run: Run) -> None:
    samples = run.samples(4)
    driver, megatron = run.start()
    megatron.not_finite = (samples[1],)
    assert driver.turn() is None
    assert run.server.do(run.server.ledger.turn(samples[1])).state is TurnState.DROPPED
    run.finish()
    run.check([samples[0], *samples[2:]])


def test_an_engine_that_starts_again_is_met_anew_and_nothing_is_lost(run: Run) -> None:
    samples = run.samples(3)
    driver, _ = run.start()
    driver.turn()
    before = run.client.tip().engine
    run.server.engine.weight_version, run.server.engine.holds = 0, []  # it was restarted, with the base
    run.server.serving.hold()  # as its end does, when it is the server's child
    while (
        run.client.tip().engine == before
    ):  # a push that comes first would be taken: the toy engine has no group to lose
        time.sleep(0.005)
    with pytest.raises(StartAgain, match="engine was started again"):
        turns(driver, 100)
    run.finish()
    run.check(samples)
    assert not any(v.state is VersionState.LOST for v in run.server.do(run.server.ledger.versions()))


def test_a_rollback_makes_the_driver_start_again_from_there(run: Run) -> None:
    samples = run.samples(6)
    run.finish()
    run.server.do(run.server.ledger.rollback(2, requeue=True))
    run.finish()
    run.check(samples)


def test_on_a_stop_what_was_learned_is_checkpointed(run: Run) -> None:
    run.samples(2)
    driver, _ = run.start()
    driver.turn()
    driver._session.stop.set()
    driver.run()
    assert run.server.do(run.server.ledger.version(1)).durable
    assert run.client.start(TRAINER).tip.weight_version == 1  # nothing was lost


def test_what_is_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)

    def of(folder: str | None) -> list[str]:
        tip = Tip(weight_version=3, kind=WeightKind.FULL, base_hash="b", folder=folder)
        return checkpoints.load_arguments(tip, "CK")

    assert of(None) == ["--load", "CK"]
    assert of("versions/full-12") == ["--load", str(tmp_path / "versions/full-12")]  # Megatron's own was pruned
    (tmp_path / "megatron/iter_0000012").mkdir(parents=True)
    assert of("versions/full-12") == ["--load", str(tmp_path / "megatron"), "--ckpt-step", "12"]


def test_ranks_that_repeat_a_number_are_not_counted_twice() -> None:
    first = RankShare(True, True, loss=2.0, trained_tokens=5, tallies={"gap": (3.0, 5.0)})
    twin = RankShare(True, False, loss=2.0, trained_tokens=5, tallies={"gap": (3.0, 5.0)})
    other = RankShare(True, True, loss=1.0, trained_tokens=3, tallies={"gap": (1.0, 3.0)}, not_finite=("s",))
    outcome = merged([first, twin, other], samples=3, batch_size=4)
    assert outcome.metrics["loss"] == pytest.approx(3 / 4)
    assert outcome.metrics["gap"] == pytest.approx(4 / 8)
    assert outcome.not_finite == ("s",)
    with pytest.raises(ValueError, match="some ranks stepped"):
        merged([first, RankShare(False, True)], samples=1, batch_size=1)

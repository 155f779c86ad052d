"""The driver's loop over the real trainer API, ledger and publisher.

Killed or failing at every point, it starts again; in the end every sample is in the serving weights once.
"""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ledger import give_sample
from node_run import POINTS, Run, turn_and_save, turns
from publishing import Drifted
from toy_node import Killed, ToyMegatron
from turns import make_request, make_turn

from openclaw_rl.errors import EngineGone
from openclaw_rl.trainer_protocol import Commit, LeaseBody
from openclaw_rl.trainers.client import ServerGone
from openclaw_rl.types import TurnState, VersionState
from openclaw_slime.loop import SAVES_OF_HELD_CHATS, StartAgain
from openclaw_slime.rollout import Extras


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


@pytest.mark.parametrize("with_rollback", [False, True])
def test_a_lease_that_ends_while_its_step_is_computed_is_a_step_left_out(run: Run, with_rollback: bool) -> None:
    """The gradients are there, and no weight has moved: the driver goes on, and the batch comes again."""
    samples = run.samples(6)
    driver, megatron = run.start()
    driver.turn()
    at = megatron.at

    def revoke(point: str) -> None:
        if point == "computed":
            megatron.at = at  # type: ignore[method-assign]
            run.server.do(run.server.ledger.revoke(trainer=None, reason="a sample was deleted"))

    megatron.at = revoke  # type: ignore[method-assign]
    held = list(megatron.weights)
    assert driver.turn() is None
    assert megatron.weights == held
    assert run.server.health.failures == {}
    if with_rollback:
        run.server.do(run.server.ledger.rollback(0, requeue=True))
    run.finish(driver)
    run.check(samples)
    assert run.starts == 1 + with_rollback


def test_a_step_that_drifts_is_refused_by_the_engines_own_figures(run: Run) -> None:
    """The driver's commits carry no probe. The driver starts again, and learns on from what served before."""
    run.server.engine.policy = Drifted(lost={1: 0.1, 2: 0.8})
    kept = run.samples(2)
    driver, _ = run.start()
    turn_and_save(driver)
    assert run.server.publisher.last_gate is not None
    assert run.server.publisher.last_gate.step_kl == pytest.approx(0.1)
    spoilt = run.samples(2)
    with pytest.raises(StartAgain, match=r"KL\(v1 \|\| v2\) = 0.700 > 0.5"):
        driver.turn()
    assert run.server.do(run.server.ledger.version(2)).state is VersionState.REJECTED
    driver, megatron = run.start()
    assert megatron.weights == kept
    run.finish(driver)
    run.check(kept)
    assert run.counts()["dropped.gate_rejected"] == len(spoilt)


def test_a_deletion_while_the_optimizer_steps_waits_for_the_commit(run: Run) -> None:
    """The weights hold the sample then, and the deletion names their version. The driver goes on."""
    ledger = run.server.ledger

    def sample(name: str, session: str) -> str:
        return run.server.do(give_sample(ledger, make_request(name, session=session), make_turn(name, version=0)))

    both = [sample("mine", "mine"), sample("other", "other")]
    driver, megatron = run.start()
    at, deletions = megatron.at, []

    def forget(point: str) -> None:
        at(point)
        if point == "trained":
            deletions.append(asyncio.run_coroutine_threadsafe(ledger.forget("mine"), run.server._loop))
            with pytest.raises(TimeoutError):
                deletions[0].result(0.3)

    megatron.at = forget  # type: ignore[method-assign]
    assert driver.turn() == 1
    assert deletions[0].result(30).trained_in == (1,)
    assert sorted(run.server.engine.holds) == both
    assert (run.server.do(ledger.audit()), run.starts, driver.turn()) == ([], 1, None)


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
    with pytest.raises(StartAgain, match="engines to send weights to are others"):
        turns(driver, 100)
    run.finish()
    run.check(samples)
    assert not any(v.state is VersionState.LOST for v in run.server.do(run.server.ledger.versions()))


def test_a_start_for_other_engines_waits_for_a_checkpoint_that_failed(run: Run) -> None:
    """The weights are on no disk: a start would lose their steps."""
    samples = run.samples(3)
    driver, megatron = run.start()
    driver.turn()
    driver._engine = "those of before"
    megatron.fails_at = "save"
    for _ in range(3):
        assert driver.turn() is None
    assert len(run.server.health.problems()) == 1, "tried once, and then after a pause"
    run.now, megatron.fails_at = 1e6, ""
    with pytest.raises(StartAgain, match="are others now"):
        driver.turn()
    run.finish()
    run.check(samples)
    assert not any(v.state is VersionState.LOST for v in run.server.do(run.server.ledger.versions()))


def test_chats_that_wait_for_a_checkpoint_are_not_held_for_a_full_disk(run: Run) -> None:
    """The engine came back empty, and its weights can be written nowhere. What was learned is learned again."""
    samples = run.samples(5)
    driver, megatron = run.start()
    turns(driver, 2)  # two versions, the second durable
    samples += run.samples(1)
    assert driver.turn() == 3
    megatron.fails_at = "save"
    driver._save()
    problems = run.server.health.failures["checkpoints"]
    before = run.client.tip()
    assert not before.holds_chats
    run.server.engine.restart()
    run.server.serving.hold()  # as its end does, when it is the server's child
    while not (tip := run.client.tip()).holds_chats or tip.engine == before.engine:
        time.sleep(0.005)
    with pytest.raises(StartAgain, match="are others now"):
        turns(driver, SAVES_OF_HELD_CHATS)
    assert run.server.health.failures["checkpoints"] == problems + SAVES_OF_HELD_CHATS, "no pause comes in between"
    driver, _ = run.start()
    while not run.server.serving.is_open:
        time.sleep(0.005)
    assert run.server.do(run.server.ledger.version(3)).state is VersionState.LOST
    run.finish(driver)
    run.check(samples)


def test_files_that_the_engines_did_not_take_are_pushed_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights in Megatron are whole: no step is lost, and the driver does not start again."""
    run.config = run.config.model_copy(update={"push_folder": "push/0d51e72f"})

    def write(megatron: ToyMegatron) -> None:
        place = run.server.folder / str(run.config.folder_of(megatron._number))
        place.mkdir(parents=True, exist_ok=True)
        (place / "weights.json").write_text(json.dumps(megatron.weights))

    monkeypatch.setattr(ToyMegatron, "_push", write)
    samples = run.samples(4)
    driver, _ = run.start()
    assert driver.turn() == 1
    engine, take = run.server.engine, run.server.engine.update_weights
    gone = [EngineGone("it died in its turn")]

    async def update(folder: Path, weight_version: int) -> None:
        if gone and weight_version == 2:
            raise gone.pop()
        await take(folder, weight_version)

    monkeypatch.setattr(engine, "update_weights", update)
    assert driver.turn() == 2
    assert run.server.serving.current == 1
    for _ in range(20):
        driver.turn()
        if run.server.serving.current == 2:
            break
    driver._save()
    run.check(samples)
    assert run.starts == 1


def test_a_rollback_makes_the_driver_start_again_from_there(run: Run) -> None:
    samples = run.samples(6)
    run.finish()
    run.server.do(run.server.ledger.rollback(2, requeue=True))
    run.finish()
    run.check(samples)

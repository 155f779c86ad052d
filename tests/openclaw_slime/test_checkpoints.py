"""Checkpoints of the loop: when one is due, what makes it whole, and what a start finds of it."""

from pathlib import Path
from typing import Any

import pytest
from node_run import Run, number, tip, turns
from toy_node import Killed

from openclaw_rl.trainer_protocol import Tip
from openclaw_rl.trainers.client import ServerGone
from openclaw_rl.types import VersionState, WeightKind
from openclaw_slime import checkpoints
from openclaw_slime.checkpoints import Checkpoints, Due
from openclaw_slime.loop import StartAgain
from openclaw_slime.node import TRAINER


def test_updates_are_pushed_at_once_and_checkpointed_now_and_then(run: Run) -> None:
    samples = run.samples(7)
    run.finish()
    run.check(samples)  # the last batch was of one, and a filler
    versions = run.server.do(run.server.ledger.versions())
    assert [v.weight_version for v in versions if v.durable] == [0, 2, 4]
    assert [v.state for v in versions[:-1]] == [VersionState.RETIRED] * 4
    assert len(list(run.checkpoints.megatron.glob("iter_*"))) == 2
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

"""A crash of the trainer at each point, and the next start."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from trainer_bench import Bench, Killed

from openclaw_rl.trainer_protocol import SampleBody
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.client import ServerGone
from openclaw_rl.trainers.loop import LEASE_FILE
from openclaw_rl.types import Sample


def killed() -> None:
    raise Killed


def killed_at_release(bench: Bench) -> None:
    """A killed process does not release either."""

    def no_release() -> httpx.Response:
        raise Killed

    bench.api.hooks["release"] = no_release


@pytest.mark.parametrize("point", ["step", "write", "commit_not_sent", "commit_not_answered"])
def test_a_kill_loses_no_sample_and_repeats_none(bench: Bench, point: str) -> None:
    """Case CR-1. After the kill a new process settles what the old one left, at once."""
    killed_at_release(bench)
    if point == "step":
        bench.learner.during = lambda between: killed()  # type: ignore[assignment,return-value]
    elif point == "write":
        write = bench.learner.write

        def half(folder: Path) -> str:
            write(folder)
            raise Killed

        bench.learner.write = half  # type: ignore[method-assign]
    elif point == "commit_not_sent":
        bench.api.hooks["commit"] = lambda: killed()  # type: ignore[assignment,return-value]
    else:
        bench.api.after["commit"] = killed
    with pytest.raises(Killed):
        bench.loop.turn()
    assert bench.remembers_a_lease
    bench.api.hooks.clear()
    (bench.data_dir / "versions" / ".tmp-lease-1").mkdir(parents=True, exist_ok=True)  # a real kill cleans nothing up
    bench.restart()
    made = bench.loop.turn()
    assert not any(name.startswith(".") for name in bench.folders)
    if point in ("step", "write"):
        assert made == 1
        assert bench.api.released == [("the trainer was restarted", {})]
    else:
        assert made is None  # nothing is left to lease: the old step was committed
    assert bench.tip_weights == {"steps": 1, "samples": 4}
    assert len(bench.api.commits) == 1
    assert not bench.remembers_a_lease


def test_a_left_step_that_the_server_cannot_read_gives_its_samples_back(bench: Bench, batch: list[Sample]) -> None:
    """Its commit is answered 422: no refusal, and no step either."""
    killed_at_release(bench)
    bench.api.hooks["commit"] = lambda: killed()  # type: ignore[assignment,return-value]
    with pytest.raises(Killed):
        bench.loop.turn()
    bench.api.hooks.clear()
    bench.api.hooks["commit"] = lambda: httpx.Response(422, json={"error": {"message": "report: not a report"}})
    bench.restart()
    bench.api.after["release"] = bench.api.hooks.clear
    assert bench.loop.turn() == 1
    assert bench.api.released == [("its step cannot be committed", {})]


def test_an_unanswered_commit_is_settled_by_the_same_process(bench: Bench, batch: list[Sample]) -> None:
    """The server commits and goes away before it answers: the folder must stay, the version is ours."""
    answers = 0

    def gone_after_commit() -> None:
        nonlocal answers
        answers += 1
        bench.api.hooks["commit"] = lambda: httpx.Response(503, json={})
        raise httpx.ReadError("connection reset")

    bench.api.after["commit"] = gone_after_commit
    with pytest.raises(ServerGone):
        bench.loop.turn()
    assert bench.folders == ["lease-1"]
    bench.api.hooks.clear()
    bench.api.waiting = [SampleBody.of(sample) for sample in batch]
    assert bench.loop.turn() == 2
    assert bench.tip_weights == {"steps": 2, "samples": 8}


def test_a_step_whose_lease_ran_out_while_nobody_ran_is_discarded(bench: Bench) -> None:
    killed_at_release(bench)
    bench.api.hooks["commit"] = lambda: killed()  # type: ignore[assignment,return-value]
    with pytest.raises(Killed):
        bench.loop.turn()
    bench.api.hooks.clear()
    bench.api.expire()
    bench.restart()
    assert bench.loop.turn() == 1
    assert bench.folders == ["lease-2"]
    assert bench.tip_weights["steps"] == 1


def test_a_bug_gives_the_batch_back_and_climbs(bench: Bench) -> None:
    def bug(between: Callable[[], None]) -> None:
        raise KeyError("oops")

    bench.learner.during = bug
    with pytest.raises(KeyError):
        bench.loop.run()
    assert bench.api.released == [("KeyError: 'oops'", {})]


def test_a_torn_lease_file_is_forgotten(bench: Bench) -> None:
    (bench.data_dir / LEASE_FILE).write_text("{")
    assert bench.loop.turn() == 1


def test_old_optimizer_states_go_and_adapters_stay(bench: Bench, batch: list[Sample]) -> None:
    bench.loop._keep_optimizers = 2
    for _ in range(4):
        bench.api.waiting = [SampleBody.of(sample) for sample in batch]
        bench.loop.turn()
    versions = bench.data_dir / "versions"
    assert bench.folders == ["lease-1", "lease-2", "lease-3", "lease-4"]
    assert [(versions / name / checkpoint.OPTIMIZER_FILE).exists() for name in bench.folders] == [
        False,
        False,
        True,
        True,
    ]


def test_the_optimizer_state_of_a_version_that_may_be_fallen_back_to_stays(bench: Bench, batch: list[Sample]) -> None:
    """However many candidates came after it: when they are all rejected, training goes on from there."""
    bench.loop._keep_optimizers = 2
    for _ in range(5):
        bench.api.waiting = [SampleBody.of(sample) for sample in batch]
        bench.loop.turn()
        bench.api.tip = bench.api.tip.model_copy(update={"needed": ["versions/lease-1"]})
    states = [(bench.data_dir / "versions" / f"lease-{n}" / checkpoint.OPTIMIZER_FILE).exists() for n in range(1, 6)]
    assert states == [True, False, False, True, True]

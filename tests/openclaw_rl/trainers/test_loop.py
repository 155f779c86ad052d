"""The loop against a trainer API in memory: what is committed, and what goes back."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from trainer_bench import Bench, FakeApi

from openclaw_rl.errors import TrainerError
from openclaw_rl.trainer_protocol import Commit, SampleBody, Tip
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.base import NoStep, Step
from openclaw_rl.trainers.loop import WrongBase
from openclaw_rl.types import SHARED_POLICY, DropReason, Sample, WeightKind


def test_a_step_from_lease_to_commit(bench: Bench) -> None:
    assert bench.loop.turn() == 1
    assert bench.tip_weights == {"steps": 1, "samples": 4}
    assert bench.folders == ["lease-1"]
    commit = Commit.model_validate_json((bench.data_dir / "versions" / "lease-1" / checkpoint.COMMIT_FILE).read_bytes())
    assert (commit.parent, commit.manifest.folder, commit.manifest.base_hash) == (0, "versions/lease-1", "base")
    assert commit.manifest.sha256 == checkpoint.sha256(bench.data_dir / "versions" / "lease-1" / "weights")
    checkpoint.verify(bench.data_dir / "versions" / "lease-1")
    assert bench.loop.turn() is None
    assert bench.learner.loads == [(None, False)]  # its own commit is not loaded again
    assert not bench.remembers_a_lease


def test_dropped_samples_and_metrics_travel_with_the_commit(bench: Bench) -> None:
    bench.learner.during = lambda between: Step({"loss": 2.0}, {"a": DropReason.TOO_LONG})
    bench.loop.turn()
    commit = Commit.model_validate_json((bench.data_dir / "versions" / "lease-1" / checkpoint.COMMIT_FILE).read_bytes())
    assert (commit.drop, commit.report.metrics) == ({"a": "too_long"}, {"loss": 2.0})


def test_no_step_gives_the_batch_back_and_loads_again(bench: Bench) -> None:
    bench.learner.during = lambda between: NoStep("not finite", {"b": DropReason.NON_FINITE})
    assert bench.loop.turn() is None
    assert bench.api.released == [("not finite", {"b": "non_finite"})]
    assert bench.api.failures == ["not finite"]
    bench.learner.during = lambda between: None
    assert bench.loop.turn() == 1
    assert bench.tip_weights == {"steps": 1, "samples": 3}  # nothing of the failed step is in the weights


def test_the_server_is_told_why_no_step_succeeds(bench: Bench) -> None:
    def full(between: Callable[[], None]) -> None:
        bench.stop.set()  # after this one
        raise OSError(28, "No space left on device")

    bench.learner.during = full
    bench.loop.run()
    assert bench.api.failures == ["[Errno 28] No space left on device"]
    assert len(bench.api.waiting) == 4
    # Nor does it matter that a server does not know the call.
    bench.stop.clear()
    bench.api.hooks["failed"] = lambda: httpx.Response(404, json={})
    bench.loop.run()
    assert len(bench.api.waiting) == 4


def test_a_stop_gives_the_batch_back(bench: Bench) -> None:
    def stopped(between: Callable[[], None]) -> None:
        bench.stop.set()
        between()

    bench.learner.during = stopped
    bench.loop.run()
    assert bench.api.released == [("the trainer was asked to stop", {})]
    assert len(bench.api.waiting) == 4
    assert not bench.remembers_a_lease
    assert bench.folders == []


def test_a_lease_that_ran_out_ends_the_step(bench: Bench) -> None:
    def lost(between: Callable[[], None]) -> None:
        bench.api.expire()
        over = threading.Event()
        while not over.wait(0.01):  # until the renewal was refused
            between()

    bench.learner.during = lost
    assert bench.loop.turn() is None
    assert bench.folders == []
    bench.learner.during = lambda between: None
    assert bench.loop.turn() == 1
    assert bench.tip_weights["steps"] == 1


def test_a_lease_is_renewed_while_its_step_runs(bench: Bench) -> None:
    seen = threading.Event()

    def renewed() -> None:
        seen.set()

    bench.api.after["renew"] = renewed

    def slow(between: Callable[[], None]) -> None:
        assert seen.wait(120)

    bench.learner.during = slow
    assert bench.loop.turn() == 1
    assert bench.api.renewals >= 1


def test_a_process_that_stood_still_for_longer_than_its_lease_asks_the_server(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A starved or stopped machine stops the renewing thread with the step: the step does not hang."""
    seen, clock = threading.Event(), time.monotonic
    bench.api.after["renew"] = seen.set

    def stopped(between: Callable[[], None]) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)
        assert seen.wait(120)

    bench.learner.during = stopped
    assert bench.loop.turn() == 1
    assert bench.api.renewals >= 1


def test_a_step_that_hangs_is_renewed_no_longer_and_somebody_is_told(bench: Bench) -> None:
    hangs = threading.Event()
    bench.restart(on_hang=hangs.set)

    def hang(between: Callable[[], None]) -> None:
        assert hangs.wait(120)
        between()  # it moves after all: too late

    bench.learner.during = hang
    assert bench.loop.turn() is None
    assert 1 <= bench.api.renewals <= 3
    assert bench.folders == []


def test_the_trainers_wall_clock_has_no_part_in_renewing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set an hour forward or back, and again, while a step runs."""
    seen, times = threading.Event(), itertools.cycle((3600.0, -3600.0))
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + next(times))

    def renewed() -> None:
        seen.set()

    bench.api.after["renew"] = renewed

    def slow(between: Callable[[], None]) -> None:
        assert seen.wait(120)

    bench.learner.during = slow
    assert bench.loop.turn() == 1
    assert 1 <= bench.api.renewals <= 2


def test_a_refused_commit_leaves_no_folder_and_no_weights(bench: Bench) -> None:
    def refuse() -> httpx.Response:
        bench.api.hooks.clear()
        bench.api.expire()
        return httpx.Response(409, json={"error": {"message": "the parent was rolled back"}})

    bench.api.hooks["commit"] = refuse
    assert bench.loop.turn() is None
    assert bench.folders == []
    assert not bench.remembers_a_lease
    assert bench.loop.turn() == 1
    assert bench.tip_weights["steps"] == 1


def test_a_tip_that_moved_is_loaded_with_its_moments_or_fresh(bench: Bench) -> None:
    bench.loop.turn()
    first = bench.api.tip
    bench.api.waiting = [SampleBody.of(sample) for sample in []]
    bench.api.tip = first.model_copy(update={"weight_version": 5, "needs_fresh_moments": True})
    bench.loop.turn()
    assert bench.learner.loads == [(None, False), ("lease-1", True)]


def test_a_rollback_between_tip_and_lease_is_seen(bench: Bench, batch: list[Sample]) -> None:
    bench.loop.turn()
    bench.api.waiting = [SampleBody.of(sample) for sample in batch]

    def roll_back() -> None:
        bench.api.tip = Tip(weight_version=0, kind=WeightKind.LORA, base_hash="base", folder=None)

    bench.api.after["tip"] = roll_back
    assert bench.loop.turn() == 1
    assert bench.tip_weights == {"steps": 1, "samples": 4}  # on the base, not on what was rolled back


def test_a_torn_tip_is_refused_by_name_and_nothing_is_leased(bench: Bench, batch: list[Sample]) -> None:
    bench.loop.turn()
    bench.restart()
    bench.api.waiting = [SampleBody.of(sample) for sample in batch]
    (bench.data_dir / "versions" / "lease-1" / "weights").write_text("{")
    with pytest.raises(TrainerError, match=r"lease-1 is torn: weights"):
        bench.loop.turn()
    assert bench.api.lease is None


def test_a_full_disk_costs_the_step_and_not_the_samples(bench: Bench) -> None:
    write = bench.learner.write

    def full(folder: Path) -> str:
        write(folder)
        raise OSError(28, "No space left on device")

    bench.learner.write = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space"):
        bench.loop.turn()
    assert bench.folders == []
    assert len(bench.api.waiting) == 4
    bench.learner.write = write  # type: ignore[method-assign]
    assert bench.loop.turn() == 1
    assert bench.tip_weights["steps"] == 1


def test_another_base_is_an_error_at_once(bench: Bench) -> None:
    bench.api.tip = bench.api.tip.model_copy(update={"base_hash": "other"})
    with pytest.raises(WrongBase, match="the server trains lora on base other"):
        bench.loop.run()


def test_a_server_that_comes_back_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def wait(seconds: float | None = None) -> bool:
        pauses.append(seconds or 0)
        if len(pauses) == 3:
            bench.api.hooks.clear()
        if bench.api.commits:
            bench.stop.set()
        return bench.stop.is_set()

    bench.api.hooks["tip"] = lambda: httpx.Response(503, json={})
    bench.loop._session.stop = type("Stop", (), {"wait": staticmethod(wait), "is_set": bench.stop.is_set})()
    bench.api.after["commit"] = bench.stop.set
    bench.loop.run()
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert bench.tip_weights["steps"] == 1


class _TwoUsers(FakeApi):
    """A lease at a time of the policies in `order`; each has a tip of its own. Numbers of versions are global."""

    def __init__(self, samples: Sequence[Sample], order: Sequence[str]) -> None:
        super().__init__(samples)
        self.batch, self.order = list(self.waiting), list(order)
        names = (SHARED_POLICY, "user:ann", "user:bob")
        self.tips = {name: self.tip.model_copy(update={"weight_version": number}) for number, name in enumerate(names)}
        self.newest = 2

    def _tip(self, body: object) -> httpx.Response:
        assert isinstance(body, dict)
        if body["policy"] not in self.tips:
            return httpx.Response(409, json={"error": {"message": "there is no such policy"}})
        return httpx.Response(200, content=self.tips[body["policy"]].model_dump_json())

    def _lease(self, body: object) -> httpx.Response:
        if not self.order:
            return httpx.Response(200, json={"lease": None})
        policy = self.order.pop(0)
        self.waiting, self.tip = list(self.batch), self.tips[policy]
        granted = super()._lease(body)
        assert self.lease is not None
        self.lease = self.lease.model_copy(update={"policy": policy})
        return httpx.Response(200, json={"lease": granted.json()["lease"] | {"policy": policy}})

    def _commit(self, body: dict[str, object]) -> httpx.Response:
        lease = self.lease
        assert lease is not None
        self.tip = self.tips[lease.policy].model_copy(update={"weight_version": self.newest})
        self.newest += 1
        commit = Commit.model_validate(body)
        assert commit.parent == self.tips[lease.policy].weight_version
        self.tips[lease.policy] = self.tip.model_copy(
            update={"weight_version": self.newest, "folder": commit.manifest.folder}
        )
        self.lease = None
        return httpx.Response(200, json={"weight_version": self.newest})


def weights_of(bench: Bench, folder: str | None) -> dict[str, int]:
    assert folder is not None
    found: dict[str, int] = json.loads((bench.data_dir / folder / "weights").read_text())
    return found


def test_a_step_continues_the_policy_of_its_lease(tmp_path: Path, batch: list[Sample]) -> None:
    order = ["user:ann", "user:bob", "user:ann", "user:ann", SHARED_POLICY, "user:bob"]
    api = _TwoUsers(batch, order)
    bench = Bench(tmp_path, api)
    for _ in order:
        assert bench.loop.turn() is not None
    for policy, steps in (("user:ann", 3), ("user:bob", 2), (SHARED_POLICY, 1)):
        assert weights_of(bench, api.tips[policy].folder) == {"steps": steps, "samples": steps * len(batch)}
    # One load of the shared policy before the first lease, and one where a lease is of another policy than the last.
    assert len(bench.learner.loads) == 1 + 5


def test_a_policy_that_was_removed_costs_no_other_a_step(tmp_path: Path, batch: list[Sample]) -> None:
    api = _TwoUsers(batch, ["user:ann", "user:bob"])
    bench = Bench(tmp_path, api)
    assert bench.loop.turn() is not None
    del api.tips["user:ann"]
    assert bench.loop.turn() is not None
    assert weights_of(bench, api.tips["user:bob"].folder)["steps"] == 1
    assert api.failures == []


def test_a_damaged_tip_of_one_policy_does_not_stop_the_others(tmp_path: Path, batch: list[Sample]) -> None:
    api = _TwoUsers(batch, ["user:ann", "user:bob"])
    bench = Bench(tmp_path, api)
    assert bench.loop.turn() is not None
    folder = api.tips["user:ann"].folder
    assert folder is not None
    (bench.data_dir / folder / "weights").write_text("{")
    bench.restart()
    bench.loop._policy = "user:ann"
    assert bench.loop.turn() is not None
    assert weights_of(bench, api.tips["user:bob"].folder)["steps"] == 1

"""The loop against a trainer API in memory: what is committed, what goes back, what a crash at each point leaves."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from openclaw_rl.errors import TrainerError
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.api import Commit, LeaseBody, SampleBody, Tip
from openclaw_rl.trainers.base import NoStep, Step
from openclaw_rl.trainers.client import ServerGone, TrainerClient
from openclaw_rl.trainers.loop import LEASE_FILE, TrainerLoop, WrongBase
from openclaw_rl.types import DropReason, Sample, WeightKind


class Killed(BaseException):
    """The process is gone: nothing after it runs."""


class FakeApi:
    """A ledger of versions and one lease at a time, behind the wire's bodies."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.waiting = [SampleBody.of(sample) for sample in samples]
        self.lease: LeaseBody | None = None
        self.fence = 0
        self.tip = Tip(weight_version=0, kind=WeightKind.LORA, base_hash="base", folder=None)
        self.commits: dict[str, int] = {}
        self.released: list[tuple[str, dict[str, str]]] = []
        self.renewals = 0
        self.hooks: dict[str, Callable[[], httpx.Response | None]] = {}
        """Verb → what happens instead; None goes on as usual."""
        self.after: dict[str, Callable[[], None]] = {}
        """Verb → what happens once it is done, before it is answered."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        verb = request.url.path.rsplit("/", 1)[1]
        hook = self.hooks.get(verb)
        if hook is not None and (answer := hook()) is not None:
            return answer
        answer = getattr(self, f"_{verb}")(json.loads(request.content))
        if verb in self.after:
            self.after.pop(verb)()
        return answer

    def _tip(self, _: object) -> httpx.Response:
        return httpx.Response(200, content=self.tip.model_dump_json())

    def _lease(self, _: object) -> httpx.Response:
        if self.lease is not None or not self.waiting:
            return httpx.Response(200, json={"lease": None})
        self.fence += 1
        batch, self.waiting = self.waiting, []
        self.lease = LeaseBody(
            lease_id=f"lease-{self.fence}",
            fence=self.fence,
            parent=self.tip.weight_version,
            expires_at=0,
            lease_s=1.5,
            samples=batch,
        )
        return httpx.Response(200, json={"lease": self.lease.model_dump(mode="json")})

    def _renew(self, body: dict[str, object]) -> httpx.Response:
        self.renewals += 1
        return httpx.Response(200, json={"expires_at": 0.0}) if self._is_live(body) else httpx.Response(409, json={})

    def _release(self, body: dict[str, object]) -> httpx.Response:
        if not self._is_live(body):
            return httpx.Response(409, json={})
        assert self.lease is not None
        drop = body["drop"]
        assert isinstance(drop, dict)
        self.released.append((str(body["reason"]), drop))
        self.waiting += [sample for sample in self.lease.samples if sample.sample_id not in drop]
        self.lease = None
        return httpx.Response(200, json={})

    def _commit(self, body: dict[str, object]) -> httpx.Response:
        commit = Commit.model_validate(body)
        if commit.lease_id in self.commits:
            return httpx.Response(200, json={"weight_version": self.commits[commit.lease_id]})
        if not self._is_live(body) or commit.parent != self.tip.weight_version:
            return httpx.Response(409, json={"error": {"message": "the lease is over"}})
        version = self.tip.weight_version + 1
        self.commits[commit.lease_id] = version
        self.tip = self.tip.model_copy(update={"weight_version": version, "folder": commit.manifest.folder})
        self.lease = None
        return httpx.Response(200, json={"weight_version": version})

    def expire(self) -> None:
        assert self.lease is not None
        self.waiting, self.lease = [*self.lease.samples], None

    def _is_live(self, body: dict[str, object]) -> bool:
        return self.lease is not None and (body["lease_id"], body["fence"]) == (self.lease.lease_id, self.lease.fence)


class CountingLearner:
    """Its weights are the number of steps and of samples it learned."""

    kind = WeightKind.LORA
    base_hash = "base"

    def __init__(self) -> None:
        self.state = {"steps": -1, "samples": -1}
        self.loads: list[tuple[str | None, bool]] = []
        self.during: Callable[[Callable[[], None]], Step | NoStep | None] = lambda between: None

    def load(self, folder: Path | None, *, fresh_moments: bool) -> None:
        self.loads.append((None if folder is None else folder.name, fresh_moments))
        self.state = {"steps": 0, "samples": 0} if folder is None else json.loads((folder / "weights").read_text())

    def step(self, samples: Sequence[Sample], between: Callable[[], None]) -> Step | NoStep:
        between()
        self.state = {"steps": self.state["steps"] + 1, "samples": self.state["samples"] + len(samples)}
        return self.during(between) or Step({"loss": 1.0})

    def write(self, folder: Path) -> str:
        (folder / "weights").write_text(json.dumps(self.state))
        (folder / checkpoint.OPTIMIZER_FILE).write_text("moments")
        return "weights"


class Bench:
    def __init__(self, data_dir: Path, api: FakeApi) -> None:
        self.data_dir, self.api, self.stop = data_dir, api, threading.Event()
        self.restart()

    def restart(self) -> None:
        self.learner = CountingLearner()
        client = TrainerClient("http://server", "t", transport=httpx.MockTransport(self.api), sleep=lambda _: None)
        self.loop = TrainerLoop(client, self.learner, self.data_dir, name="test", stop=self.stop, lease_wait_s=0.0)

    @property
    def folders(self) -> list[str]:
        return sorted(entry.name for entry in (self.data_dir / "versions").glob("*"))

    @property
    def tip_weights(self) -> dict[str, int]:
        assert self.api.tip.folder is not None
        weights: dict[str, int] = json.loads((self.data_dir / self.api.tip.folder / "weights").read_text())
        return weights

    @property
    def remembers_a_lease(self) -> bool:
        return (self.data_dir / LEASE_FILE).exists()


@pytest.fixture
def bench(tmp_path: Path, batch: list[Sample]) -> Bench:
    return Bench(tmp_path, FakeApi(batch))


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
    bench.learner.during = lambda between: None
    assert bench.loop.turn() == 1
    assert bench.tip_weights == {"steps": 1, "samples": 3}  # nothing of the failed step is in the weights


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
        assert seen.wait(10)

    bench.learner.during = slow
    assert bench.loop.turn() == 1
    assert bench.api.renewals >= 1


def test_a_step_that_hangs_is_renewed_no_longer_and_somebody_is_told(bench: Bench) -> None:
    hangs = threading.Event()
    bench.loop = TrainerLoop(
        TrainerClient("http://server", "t", transport=httpx.MockTransport(bench.api), sleep=lambda _: None),
        bench.learner,
        bench.data_dir,
        name="test",
        stop=bench.stop,
        lease_wait_s=0.0,
        on_hang=hangs.set,
    )

    def hang(between: Callable[[], None]) -> None:
        assert hangs.wait(20)
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
        assert seen.wait(10)

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
    bench.loop._stop = type("Stop", (), {"wait": staticmethod(wait), "is_set": bench.stop.is_set})()  # type: ignore[assignment]
    bench.api.after["commit"] = bench.stop.set
    bench.loop.run()
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert bench.tip_weights["steps"] == 1


# -- crashes -----------------------------------------------------------------------------------------------------------


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

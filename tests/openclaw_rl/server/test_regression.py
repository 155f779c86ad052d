"""The permutation test for a fall between versions: hand-made runs, false alarms, and falls that it must not report."""

import random
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.server.regression import RegressionMonitor, find_drop, find_worse
from openclaw_rl.settings import WatchSettings


def run(*stretches: tuple[range, float], seed: int = 0, per_version: int = 8) -> list[tuple[int, int]]:
    """Return `per_version` verdicts a version, +1 or −1, for each (versions, share of praise)."""
    rng = random.Random(seed)
    return [
        (v, 1 if rng.random() < share else -1)
        for versions, share in stretches
        for v in versions
        for _ in range(per_version)
    ]


def test_a_fall_is_found_at_its_version() -> None:
    verdicts = [(0, 1)] * 20 + [(1, 1)] * 20 + [(2, -1)] * 20 + [(3, -1)] * 20
    fall = find_drop(verdicts)
    assert fall is not None
    assert (fall.good, fall.before, fall.after, fall.n_before, fall.n_after) == (1, 1.0, -1.0, 40, 40)
    assert fall.p_value == pytest.approx(1 / 2001)  # no permutation of 2,000 reaches a perfect split


def test_a_rise_is_no_fall() -> None:
    assert find_drop([(0, -1)] * 50 + [(1, 1)] * 50) is None


@pytest.mark.parametrize("n", [0, 1, 29, 59])
def test_too_few_turns_on_a_side_say_nothing(n: int) -> None:
    assert find_drop([(0, 1)] * n + [(1, -1)] * 29) is None


def test_a_small_fall_is_let_be_however_sure() -> None:
    verdicts = ([(0, 1)] * 6 + [(0, -1)] * 4) * 100 + ([(1, 1)] * 5 + [(1, -1)] * 5) * 100  # 0.2 → 0.0
    assert find_drop(verdicts) is None
    assert find_drop(verdicts, drop=0.1) is not None


def test_a_fall_within_one_version_is_no_version_s_fault() -> None:
    assert find_drop([(3, 1)] * 60 + [(3, -1)] * 60) is None


def test_turns_of_an_older_version_that_ended_late_count_for_it() -> None:
    verdicts = [(0, 1)] * 40 + [(1, -1), (0, 1)] * 40
    fall = find_drop(verdicts)
    assert fall is not None
    assert (fall.good, fall.before, fall.after) == (0, 1.0, -1.0)


def test_a_slow_fall_is_seen_before_a_hundred_turns_of_it() -> None:
    """From 80 % praise to 10 % over six versions of 16 turns: the effect of a reward with the wrong sign."""
    slow = [(range(i, i + 1), share) for i, share in enumerate((0.8, 0.8, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1, 0.1))]
    for seed in range(5):
        assert find_drop(run(*slow, seed=seed, per_version=16)) is not None


def test_false_alarms_are_as_rare_as_promised() -> None:
    """One test of each of 200 even runs: p < 0.01 should occur about twice; 9 or more has a chance below 1e-3."""
    runs = (run((range(12), 0.5), seed=seed) for seed in range(200))
    assert sum(find_drop(verdicts, permutations=400, p_value=0.01) is not None for verdicts in runs) <= 8


def test_a_look_after_every_batch_finds_as_good_as_nothing_where_nothing_happens() -> None:
    """The monitor tests 25 times in each of 20 even runs of 200 turns. The promise is one alarm in 30,000 turns; two in
    these 4,000 have a chance below 1 %.
    """
    alarms = 0
    for seed in range(20):
        verdicts = run((range(25), (0.6, 0.9)[seed % 2]), seed=seed)
        alarms += any(find_drop(verdicts[:turns]) for turns in range(8, 201, 8))
    assert alarms <= 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([-1, 0, 1])), max_size=120), st.randoms())
def test_the_order_of_turns_within_a_version_changes_nothing_found(
    verdicts: list[tuple[int, int]], rng: random.Random
) -> None:
    shuffled = sorted(verdicts, key=lambda item: (item[0], rng.random()))
    first, second = (find_drop(v, min_side=5, permutations=100, p_value=1.0) for v in (verdicts, shuffled))
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert (first.good, first.n_before) == (second.good, second.n_before)


def test_a_look_takes_little_memory() -> None:
    verdicts = run((range(25), 0.9), (range(25, 50), 0.4))
    tracemalloc.start()
    try:
        assert find_drop(verdicts) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def played(version: int, share: float, tasks: range = range(200), seed: int = 0) -> list[tuple[str, int, float]]:
    """Return one evaluation: each task passed with this chance."""
    rng = random.Random(f"{version}:{share}:{seed}")
    return [(f"t{task}", version, 1.0 if rng.random() < share else -1.0) for task in tasks]


def test_the_newest_evaluation_is_compared_with_the_best_before_it() -> None:
    """Learning that rose from .26 to .88 and fell to .50: the mean of all before the fall is as low as after it."""
    before = played(0, 0.26) + played(0, 0.37, seed=1) + played(5, 0.88)
    assert find_worse(before) is None
    fall = find_worse(before + played(8, 0.5))
    assert fall is not None
    assert (fall.good, fall.n_before, fall.n_after) == (5, 200, 200)
    assert fall.before - fall.after == pytest.approx(0.76, abs=0.2)
    assert fall.p_value == pytest.approx(2 / 20_001)  # of two versions compared, and no flip of 20,000 is as large


def test_evaluations_of_other_tasks_say_nothing() -> None:
    assert find_worse(played(5, 0.9) + played(8, 0.1, range(200, 400))) is None
    assert find_worse(played(5, 0.9, range(29)) + played(8, 0.1)) is None, "too few tasks of both"
    assert find_worse([]) is None


def test_a_larger_fall_of_a_few_tasks_does_not_hide_a_clear_one_of_many() -> None:
    few, many = [(f"t{task}", 4, 1.0) for task in range(30)], [(f"t{task}", 5, 1.0) for task in range(60, 200)]
    failed = {*range(9), *range(60, 95)}
    newest = [(f"t{task}", 8, -1.0 if task in failed else 1.0) for task in range(200)]
    assert find_worse(few + newest) is None, "lower by 0.6, but nine equal signs of nine are luck once in 512 times"
    fall = find_worse(few + many + newest)
    assert fall is not None
    assert (fall.good, fall.n_after) == (5, 140)
    assert fall.before - fall.after == 0.5


def test_an_evaluation_that_has_begun_is_compared_on_its_tasks() -> None:
    hard_first = [(f"t{task}", 5, -1.0 if task < 40 else 1.0) for task in range(200)]
    assert find_worse(hard_first + [(f"t{task}", 8, -1.0) for task in range(40)]) is None
    fall = find_worse(hard_first + [(f"t{task}", 8, -1.0) for task in range(80)])
    assert fall is not None
    assert (fall.before, fall.after, fall.n_after) == (0.0, -1.0, 80)


def test_false_alarms_of_evaluations_are_as_rare_as_promised() -> None:
    """Ten evaluations of an even policy: 1 run in 100 may alarm at p < 0.01, and 4 of 60 have a chance of 0.003.

    The bound of the size is left out: it hides nearly all falls by chance.
    """
    runs = ([one for version in range(10) for one in played(version, 0.5, range(60), seed)] for seed in range(60))
    assert sum(find_worse(run, drop=0.01, p_value=0.01, permutations=1000) is not None for run in runs) <= 3


class FallenLedger:
    """Verdicts that fell after version 5, and no learned weights before it."""

    def __init__(self) -> None:
        self.verdicts = [(5, 1)] * 60 + [(6, -1)] * 60
        self.played: list[tuple[str, int, float]] = []
        self.is_learning, self.is_away = True, False

    async def user_verdicts(self, *, limit: int, before_waiting: bool, policy: str) -> list[tuple[int, int]]:
        assert before_waiting, "a judge that is away would look like a fall"
        return self.verdicts[-limit:]

    async def evaluated(self, *, policy: str) -> list[tuple[str, int, float]]:
        return self.played

    async def pinned(self, policy: str) -> None:
        return None

    async def roll_back_behind(self, good: int) -> int:
        if self.is_away:
            raise LedgerUnavailable("the disk is full")
        raise LedgerError(f"of the versions up to {good} only the base still has weights")

    async def set_learning(self, on: bool, policy: str) -> None:
        self.is_learning = on


async def test_where_only_the_base_is_left_the_monitor_alerts_once_and_pauses_learning() -> None:
    ledger, raised = FallenLedger(), []
    alerts: Any = SimpleNamespace(raise_alert=lambda event, **fields: raised.append((event, fields["reason"])))
    monitor = RegressionMonitor(ledger, SimpleNamespace(), WatchSettings(), alerts)  # type: ignore[arg-type]
    ledger.is_away = True
    with pytest.raises(LedgerUnavailable):
        await monitor.look()
    assert (ledger.is_learning, raised) == (True, [])
    ledger.is_away = False
    assert await monitor.look() is not None
    why = "of the versions up to 5 only the base still has weights"
    assert raised == [("verdicts_fall", why), ("learning_paused", why)]
    assert not ledger.is_learning
    assert monitor.falls == 0
    ledger.is_learning = True  # the operator resumes: later verdicts find the same fall
    ledger.verdicts.append((6, -1))
    assert await monitor.look() is not None
    assert (ledger.is_learning, len(raised)) == (True, 2)


def test_a_policy_that_was_removed_leaves_no_figures() -> None:
    none: Any = None
    monitor = RegressionMonitor(none, none, WatchSettings(), none)
    for policy in ("policy", "user:ann"):
        monitor._seen[policy], monitor._no_way_back[policy] = [(1, 1)], 1
        monitor._falls[policy] += 1
    monitor._forget_all_but(["policy"])
    assert [list(kept) for kept in (monitor._seen, monitor._falls, monitor._no_way_back)] == [["policy"]] * 3


class TwoVersions(FallenLedger):
    """No verdicts; both versions played held-out tasks, and the first one can serve again."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts = []
        self.played = played(5, 0.9) + played(6, 0.4)
        self.went_back: list[int] = []

    async def roll_back_behind(self, good: int) -> int:
        self.went_back.append(good)
        self.played = [one for one in self.played if one[1] <= good]  # the others are dead
        return good


async def test_an_evaluation_that_fell_rolls_back_once() -> None:
    ledger, raised = TwoVersions(), []
    alerts: Any = SimpleNamespace(raise_alert=lambda event, **fields: raised.append((event, fields)))

    async def follow() -> None:
        return None

    publisher: Any = SimpleNamespace(follow=follow)
    monitor = RegressionMonitor(ledger, publisher, WatchSettings(), alerts)  # type: ignore[arg-type]
    fall = await monitor.look()
    assert fall is not None
    assert await monitor.look() is None
    assert (ledger.went_back, monitor.falls, ledger.is_learning) == ([5], 1, True)
    ((event, fields),) = raised
    assert (event, fields["serving"], fields["good"], fields["turns_after"]) == ("rolled_back", 5, 5, 200)

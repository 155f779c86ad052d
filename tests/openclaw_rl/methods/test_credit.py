"""Credit of a group: hand-worked groups in float64, the public formula, and what may not change it."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from openclaw_rl.methods import credit

ROOT3 = math.sqrt(3)
EXACT = {"rel": 1e-12, "abs": 1e-12}

votes = st.sampled_from([None, -1.0, -1 / 3, 0.0, 1 / 3, 1.0])
outcomes = st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0])
episodes = st.lists(st.tuples(outcomes, st.lists(votes, min_size=1, max_size=5)), min_size=2, max_size=8)


def step_wise(group, *, weight=1.0, floor=0.0):
    found = [credit.rewards(outcome, process, weight) for outcome, process in group]
    return credit.step_wise(found, [outcome for outcome, _ in group], floor)


def public_bucket(values):
    """The estimator of the public system, for a bucket of two or more with variance (its 1e-6 left out)."""
    n = len(values)
    mean = sum(values) / n
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / n)
    return [(v - mean) / std for v in values]


def test_rewards_add_the_process_reward_and_an_unjudged_step_has_the_outcome_alone():
    assert credit.rewards(-1.0, [1.0, None, 0.0, -1 / 3], 1.0) == [0.0, -1.0, -1.0, -1.0 - 1 / 3]
    assert credit.rewards(0.5, [1.0, -1.0], 0.0) == [0.5, 0.5]
    assert credit.rewards(0.5, [1.0, -1.0], 2.0) == [2.5, -1.5]


def test_a_group_worked_by_hand():
    # R at step 1: 2, -2, 1 → mean 1/3, deviations 5/3, -7/3, 2/3, variance 26/9. Step 2: 1, -1 → ±1.
    # Step 3 has one member: outcomes 1, -1, 1 → mean 1/3, deviations 2/3, -4/3, 2/3, variance 8/9.
    group = [(1.0, [1.0, None, 1.0]), (-1.0, [-1.0, 0.0]), (1.0, [0.0])]
    std = math.sqrt(26) / 3
    assert step_wise(group) == [
        pytest.approx([5 / 3 / std, 1.0, (2 / 3) / (math.sqrt(8) / 3)], **EXACT),
        pytest.approx([-7 / 3 / std, -1.0], **EXACT),
        pytest.approx([2 / 3 / std], **EXACT),
    ]


def test_outcomes_worked_by_hand():
    # Mean 0.5, deviations 0.5, 0.5, -1.5, 0.5, variance 0.75.
    assert credit.grpo([1.0, 1.0, -1.0, 1.0], 0.1) == pytest.approx([1 / ROOT3, 1 / ROOT3, -ROOT3, 1 / ROOT3], **EXACT)
    assert credit.grpo([0.1, 0.1, 0.1], 0.1) is None
    assert credit.grpo([1.0], 0.1) is None
    assert credit.grpo([], 0.1) is None


def test_the_floor_bounds_what_a_small_difference_is_worth():
    # One vote of three differs in one of two members: R = 1 and 2/3, std 1/6 > 0.1: still ±1. Then half a tenth apart.
    assert credit.standardised([1.0, 2 / 3], 0.1) == pytest.approx([1.0, -1.0], **EXACT)
    assert credit.standardised([0.55, 0.5], 0.1) == pytest.approx([0.25, -0.25], **EXACT)
    assert credit.standardised([0.55, 0.5], 0.0) == pytest.approx([1.0, -1.0], **EXACT)


def test_a_bucket_of_one_falls_back_to_the_outcomes_and_keeps_no_raw_value():
    longest = step_wise([(1.0, [1.0, 1.0]), (-1.0, [-1.0])])
    assert longest == [pytest.approx([1.0, 1.0], **EXACT), pytest.approx([-1.0], **EXACT)]
    assert step_wise([(1.0, [1.0, 1.0]), (1.0, [-1.0])])[0][1] is None  # and has no contrast where they have none


def test_without_contrast_there_is_no_credit():
    assert step_wise([(1.0, [0.0, 1.0]), (1.0, [0.0, -1.0])]) == [[None, 1.0], [None, -1.0]]


def test_single_compares_with_the_baseline():
    assert credit.single([1.5, 0.25, -1.0], 0.25) == [1.25, None, -1.25]


def test_weights_of_episodes_give_each_the_same_sum():
    # Four samples: three of episode 7 and one of 8. Each episode's weights add up to 2 of 4.
    assert credit.episode_weights([7, 8, 7, 7]) == pytest.approx([2 / 3, 2.0, 2 / 3, 2 / 3], **EXACT)
    assert credit.episode_weights([]) == []


@given(episodes)
def test_floor_0_and_buckets_of_two_equal_the_public_formula(group):
    found = [credit.rewards(outcome, process, 1.0) for outcome, process in group]
    for k in range(max(map(len, found))):
        members = [i for i, steps in enumerate(found) if len(steps) > k]
        values = [found[i][k] for i in members]
        if len(members) < 2:
            continue
        ours = [step_wise(group)[i][k] for i in members]
        if min(values) == max(values):
            assert ours == [None] * len(members)
        else:
            assume(max(values) - min(values) > 1e-9)  # sums in another order may differ in their last bit
            assert ours == pytest.approx(public_bucket(values), rel=1e-9, abs=1e-9)


@given(episodes, st.sampled_from([-2.0, -0.5, 0.25, 1.0, 4.0]), st.sampled_from([0.0, 0.1, 1.0]))
def test_a_constant_added_to_a_bucket_changes_nothing(group, constant, floor):
    found = [credit.rewards(outcome, process, 1.0) for outcome, process in group]
    alone = [outcome for outcome, _ in group]
    moved = [[value + constant * (k + 1) for k, value in enumerate(steps)] for steps in found]
    for before, after in zip(credit.step_wise(found, alone, floor), credit.step_wise(moved, alone, floor), strict=True):
        for a, b in zip(before, after, strict=True):
            assert (a is None) == (b is None) or math.isclose(a or 0.0, b or 0.0, abs_tol=1e-6)
            assert a is None or b is None or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


@given(episodes, st.randoms())
def test_the_order_of_the_members_changes_nothing(group, random):
    order = list(range(len(group)))
    random.shuffle(order)
    shuffled = step_wise([group[i] for i in order], floor=0.1)
    straight = step_wise(group, floor=0.1)
    assert [straight[i] for i in order] == shuffled  # to the last bit


@given(episodes)
def test_a_bucket_has_mean_0_and_at_most_the_spread_1(group):
    credited = step_wise(group, floor=0.1)
    for k in range(max(map(len, credited))):
        values = [steps[k] for steps in credited if len(steps) > k]
        if len(values) > 1 and None not in values:
            assert math.fsum(values) == pytest.approx(0.0, abs=1e-9)
            assert math.fsum(v * v for v in values) / len(values) <= 1 + 1e-9

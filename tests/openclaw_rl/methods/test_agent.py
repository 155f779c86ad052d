"""The method `agent`: which steps of a closed group get credit, and what the trainer makes of it."""

from dataclasses import replace

import pytest
from ledger import sample_of
from turns import make_turn

from openclaw_rl.methods.agent import METHOD, AgentSettings
from openclaw_rl.methods.base import GroupMethod, load_method
from openclaw_rl.settings import Settings
from openclaw_rl.trainer_protocol import SampleBody
from openclaw_rl.types import ClosedGroup, DropReason, GroupStep, Trajectory


def group_of(*episodes, size=None, earlier=()):
    """Each episode: its outcome and its steps' process rewards. Step k of episode i is turn `i.k`."""
    trajectories = tuple(
        Trajectory(outcome, tuple(GroupStep(f"{i}.{k}", p, is_waiting=True) for k, p in enumerate(process, 1)))
        for i, (outcome, process) in enumerate(episodes)
    )
    return ClosedGroup(1, len(episodes) if size is None else size, trajectories, earlier)


def credited(group, **settings):
    """The advantage, or the reason of the drop, of each turn."""
    return {found.turn_id: found.drop or found.advantage for found in METHOD.credit(group, AgentSettings(**settings))}


TWO = group_of((1.0, [1.0, None]), (-1.0, [1.0, None]))


def test_it_is_found_by_name_and_has_the_hook_of_groups():
    method: GroupMethod = load_method("agent")  # type: ignore[assignment]
    settings = Settings(method={"name": "agent"}).method
    assert method is METHOD
    assert settings.credits_groups
    assert settings.judges_steps
    assert not Settings(method={"name": "agent", "process_weight": 0}).method.judges_steps
    assert not Settings().method.credits_groups


def test_the_default_compares_steps_of_equal_index():
    assert credited(TWO) == {"0.1": 1.0, "0.2": 1.0, "1.1": -1.0, "1.2": -1.0}
    rewards = [found.reward for found in METHOD.credit(TWO, AgentSettings())]
    assert rewards == [2.0, 1.0, 0.0, -1.0]


def test_grpo_gives_each_step_the_outcomes_credit_whatever_the_judge_said():
    group = group_of((1.0, [-1.0, -1.0]), (-1.0, [1.0]))
    assert credited(group, estimator="grpo") == {"0.1": 1.0, "0.2": 1.0, "1.1": -1.0}
    flat = group_of((1.0, [-1.0]), (1.0, [1.0]))
    assert credited(flat, estimator="grpo") == {"0.1": DropReason.NO_CONTRAST, "1.1": DropReason.NO_CONTRAST}


def test_an_outcome_weight_of_0_leaves_the_steps_own_rewards():
    group = group_of((1.0, [1.0, 1.0]), (-1.0, [1.0, -1.0, 1.0]))
    assert credited(group, outcome_weight=0) == {
        "0.1": DropReason.NO_CONTRAST,
        "1.1": DropReason.NO_CONTRAST,
        "0.2": 1.0,
        "1.2": -1.0,
        "1.3": DropReason.NO_CONTRAST,  # alone at its index: the outcomes would decide
    }
    assert credited(group, outcome_weight=0, estimator="grpo")["0.1"] == DropReason.NO_CONTRAST
    alone = group_of((1.0, [0.5, None]), size=1, earlier=(1.0, -1.0, 1.0))
    assert credited(alone, outcome_weight=0) == {"0.1": 0.5, "0.2": DropReason.NO_CONTRAST}
    assert credited(alone, outcome_weight=3)["0.2"] == pytest.approx(3 - 1)


def test_a_process_weight_of_0_leaves_the_outcome_alone():
    group = group_of((0.5, [1.0]), (0.5, [-1.0]))
    assert credited(group, process_weight=0) == {"0.1": DropReason.NO_CONTRAST, "1.1": DropReason.NO_CONTRAST}
    assert credited(group, process_weight=1) == {"0.1": 1.0, "1.1": -1.0}


def test_a_verdict_of_0_is_a_number_and_not_the_same_as_none():
    judged, unjudged = group_of((-1.0, [0.0]), (-1.0, [1.0])), group_of((-1.0, [None]), (-1.0, [1.0]))
    assert credited(judged) == credited(unjudged) == {"0.1": -1.0, "1.1": 1.0}
    # With the weight's sign and another outcome they part: R is o for both, and p of 0 adds nothing to it.
    assert [found.reward for found in METHOD.credit(judged, AgentSettings(process_weight=2))] == [-1.0, 1.0]


def test_fewer_than_two_that_ended_give_no_credit_in_a_group():
    found = METHOD.credit(group_of((1.0, [1.0]), size=4), AgentSettings())
    assert [(credit.drop, credit.detail) for credit in found] == [(DropReason.GROUP_TOO_SMALL, "1 of 4 episodes ended")]
    assert METHOD.credit(group_of(size=2), AgentSettings()) == []


def test_a_group_of_one_is_compared_with_earlier_ones():
    group = group_of((1.0, [0.0, 1.0]), earlier=(1.0, 0.0, -1.0, -1.0))
    assert credited(group) == {"0.1": 1.25, "0.2": 2.25}
    assert credited(group, single_baseline=2) == {"0.1": 0.5, "0.2": 1.5}
    assert credited(group, single_baseline=0) == {"0.1": 1.0, "0.2": 2.0}
    assert credited(group_of((0.0, [None]))) == {"0.1": DropReason.NO_CONTRAST}


def test_a_turn_that_cannot_be_trained_on_counts_in_its_bucket_and_gets_no_credit():
    first, second, third = group_of((1.0, [None]), (-1.0, [None]), (-1.0, [None])).trajectories
    broken = replace(second, steps=(replace(second.steps[0], is_waiting=False),))
    with_it = credited(ClosedGroup(1, 3, (first, broken, third)))
    assert with_it.keys() == {"0.1", "2.1"}
    assert with_it["0.1"] == pytest.approx(2**0.5)


def step(name, advantage, episode, tokens=2):
    turn = make_turn(name, ids=tuple(range(tokens)))
    return replace(sample_of(turn, (1, 2), reward=None), advantage=advantage, episode=episode)


def test_the_trainer_puts_the_advantage_on_every_token():
    batch = [step("a", 1.5, 1), step("b", -0.5, 2, tokens=3)]
    assert METHOD.advantages(batch, AgentSettings(), {}) == [[1.5, 1.5], [-0.5, -0.5, -0.5]]
    assert all(map(METHOD.can_train, batch))


def test_the_divisor_by_episode_weighs_a_long_episode_like_a_short_one():
    batch = [step("a", 1.0, 1), step("b", 1.0, 1), step("c", 1.0, 1), step("d", -1.0, 2)]
    found = METHOD.advantages(batch, AgentSettings(divisor="episode"), {})
    assert found == [pytest.approx([2 / 3] * 2)] * 3 + [pytest.approx([-2.0] * 2)]


def test_turns_outside_of_episodes_train_as_in_binary_rl():
    chat = sample_of(make_turn("chat"), (1, 2), reward=-1.0)
    batch = [step("a", 0.5, 1), chat]
    assert METHOD.advantages(batch, AgentSettings(baseline="none"), {}) == [[0.5, 0.5], [-1.0, -1.0]]


def test_the_advantage_crosses_the_wire_to_the_trainer():
    sample = step("a", -1.25, 3)
    assert SampleBody.model_validate_json(SampleBody.of(sample).model_dump_json()).to_sample() == sample

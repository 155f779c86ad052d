"""The comparison of `kill_agents` finds lost, foreign and doubled outcomes, mixed groups, and wrong credit."""

from typing import Any

import pytest

from e2e import kill_agents
from openclaw_rl.agents.environment import Outcome
from openclaw_rl.agents.journal import Attempt, GroupRecord, Records

NAMES = [f"run-0-{member}" for member in range(kill_agents.SIZE)]


class Kept(Records):
    """A journal in memory: one whole group, each member with its outcome."""

    def __init__(self) -> None:
        group = GroupRecord("run-0", "t", "", kill_agents.SIZE, "train", 0)
        for member, name in enumerate(NAMES):
            attempt = Attempt(name, "ended", Outcome(kill_agents.reward_of(name)))
            group.members[member] = [attempt]
        self.groups = {"run-0": group}


def rows() -> list[dict[str, Any]]:
    return [
        {
            "id": number,
            "episode_id": name,
            "state": "ended",
            "reward": kill_agents.reward_of(name),
            "has_successor": 0,
            "name": "run-0",
            "task": "t",
            "size": kill_agents.SIZE,
            "fate": "scored",
        }
        for number, name in enumerate(NAMES)
    ]


def steps() -> list[dict[str, Any]]:
    rewards = [kill_agents.reward_of(name) for name in NAMES]
    mean = sum(rewards) / len(rewards)
    spread = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [
        {"of_episode": number, "reason": None, "step": step, "advantage": (reward - mean) / spread, "fence": 1}
        for number, reward in enumerate(rewards)
        for step in range(1, kill_agents.STEPS + 1)
    ]


def found(changed_rows: list[dict[str, Any]], changed_steps: list[dict[str, Any]]) -> list[str]:
    journal = Kept()
    counted = {a.episode_id: a for many in journal.groups["run-0"].members.values() for a in many}
    return [
        *kill_agents._outcomes(journal, changed_rows, counted),
        *kill_agents._groups(journal, changed_rows),
        *kill_agents._credit(changed_rows, changed_steps),
    ]


def test_a_whole_run_has_no_finding() -> None:
    assert {kill_agents.reward_of(name) for name in NAMES} == {1.0, -1.0}
    assert found(rows(), steps()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": "aborted", "reward": None}, "LOST: the outcome of run-0-0 is in the journal alone"),
        ({"episode_id": "other"}, "the ledger has an outcome of other, and the journal none"),
        ({"reward": 0.5}, "run-0-0 has the reward 0.5"),
        ({"task": "u"}, "group run-0 has other tasks than the journal's"),
        ({"name": "run-9"}, "group run-9 has other tasks than the journal's"),
        ({"has_successor": 1}, f"group run-0 has {kill_agents.SIZE - 1} episodes"),
        ({"fate": "closed"}, "group run-0 is closed"),
    ],
)
def test_a_wrong_episode_is_found(change: dict[str, Any], words: str) -> None:
    wrong = rows()
    wrong[0] |= change
    assert any(words in finding for finding in found(wrong, steps()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"advantage": 0.3}, "has the advantage 0.3"),
        ({"advantage": None}, "has the advantage None"),
        ({"fence": 2}, "group run-0 was trained in parts"),
        ({"step": 7}, "run-0-0 has the steps [7, 2, 3]"),
    ],
)
def test_a_wrong_step_is_found(change: dict[str, Any], words: str) -> None:
    wrong = steps()
    wrong[0] |= change
    assert any(words in finding for finding in found(rows(), wrong))


def test_nothing_at_all_is_a_finding_too() -> None:
    idle = [step | {"fence": None} for step in steps()]
    assert found(rows(), idle) == ["nothing was trained"]

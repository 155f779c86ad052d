"""Figures of an evaluation by hand, the curriculum's weights, and the plan's errors."""

from collections import Counter
from pathlib import Path

import pytest

from openclaw_rl.agents import plan
from openclaw_rl.agents.curriculum import Curriculum
from openclaw_rl.agents.environment import Outcome, Task
from openclaw_rl.agents.evaluation import by_kind, figures, interval, pass_at
from openclaw_rl.errors import SettingsError


def test_pass_at_k_is_the_chance_of_k_draws() -> None:
    assert pass_at([True, False, False, False], 1) == 0.25
    assert pass_at([True, False, False, False], 2) == 0.5
    assert pass_at([True, True, False, False], 2) == pytest.approx(5 / 6)
    assert pass_at([False] * 4, 4) == 0.0


def test_one_episode_a_task_gives_wilsons_interval() -> None:
    low, high = interval([1.0] * 8 + [0.0] * 2)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # a table's
    low, high = interval([0.0] * 20)
    assert (low, high) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_episodes_of_one_task_do_not_narrow_the_interval() -> None:
    alike = figures({str(n): [n % 2 == 0] * 8 for n in range(10)}, [0.0])
    once = figures({str(n): [n % 2 == 0] for n in range(10)}, [0.0])
    assert (alike["low"], alike["high"]) == pytest.approx((once["low"], once["high"]))
    assert alike["pass@8"] == 0.5
    assert "pass@2" not in once
    assert figures({"a": []}, [])["episodes"] == 0


def test_rates_by_kind_are_told_where_there_are_several() -> None:
    assert by_kind([("a", True), ("a", False), ("b", True)]) == {"a": 0.5, "b": 1.0}
    assert by_kind([("a", True)]) == {}


def test_tasks_at_zero_or_one_come_rarer_and_never_go() -> None:
    tasks = [Task(f"{kind}{n}", kind) for kind in ("never", "always", "half") for n in range(4)]
    curriculum = Curriculum(tasks, seed=1)
    for _ in range(20):
        for task in tasks:
            outcomes = {"never": [-1, -1], "always": [1, 1], "half": [1, -1]}[task.kind]
            curriculum.saw(task.id, task.kind, [Outcome(reward) for reward in outcomes])
    drawn = [curriculum.next(number) for number in range(600)]
    count = Counter(task.kind for task in drawn if task is not None)
    assert count["half"] > 1.5 * count["never"] > 0
    assert count["half"] > 1.5 * count["always"] > 0
    assert curriculum.weight(tasks[0]) == pytest.approx(0.2, abs=0.01)


def test_a_new_task_has_the_rate_of_its_kind() -> None:
    curriculum = Curriculum([Task("a", "cp"), Task("b", "cp"), Task("c", "rm")], seed=0, fade=0.5)
    curriculum.saw("a", "cp", [Outcome(-1.0)] * 8)
    assert (curriculum.rate(Task("b", "cp")), curriculum.rate(Task("c", "rm"))) == (0.25, 0.5)
    curriculum.set_aside |= {"a", "b", "c"}
    assert curriculum.next(0) is None


PLAN = 'environment = "echo"\nfolder = "run"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "is no TOML"),
        ('folder = "run"', "environment: Field required"),
        (PLAN + "sead = 1", "sead: no such key"),
        (PLAN + "[train]\ngroup_size = 0", "train.group_size: Input should be greater than or equal to 1"),
        (PLAN + '[sandbox]\nkind = "none"', "sandbox.kind: "),
    ],
)
def test_a_wrong_plan_is_told_by_its_key(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=words):
        plan.read(file)


def test_paths_of_a_plan_are_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(PLAN + 'python = "venv/bin/python"')
    read = plan.read(file)
    assert (read.folder, read.python) == (tmp_path / "run", tmp_path / "venv/bin/python")
    with pytest.raises(SettingsError, match="No such file"):
        plan.read(tmp_path / "none.toml")

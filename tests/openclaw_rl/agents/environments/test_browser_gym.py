"""BrowserGym's adapter over a stand-in of the package, with its process and its two browsers real."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import browser_gym_stand_in
import pytest
from processes_below import below, browsers

from openclaw_rl.agents.environment import Outcome, load, whole_tasks
from openclaw_rl.agents.environments import browser_gym
from openclaw_rl.agents.environments.browser_gym import BrowserGym
from openclaw_rl.errors import EnvironmentFault, SettingsError

Play = Callable[..., Any]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BrowserGym:
    monkeypatch.setattr(browser_gym, "_WORLD", browser_gym_stand_in.world(tmp_path))
    made = load("browsergym", {"pages": ["form"], "folder": str(browser_gym_stand_in.pages(tmp_path / "html"))})
    assert isinstance(made, BrowserGym)
    return made


async def test_the_page_judges_and_what_is_wrong_is_told(environment: BrowserGym, play: Play) -> None:
    task = whole_tasks(environment, "train")[0]
    seen: list[Any] = []
    replies = iter(("Hm.", "goto('file:///etc/passwd')", "upload_file('a', '/etc/passwd')", " click('yes')\n"))

    def say(messages: list[dict[str, Any]]) -> str:
        seen.append([message["content"] for message in messages])
        return next(replies)

    assert await play(environment, task, say) == Outcome(1.0, {"steps": 4, "raw_reward": 1})
    assert seen[0][0].endswith("press, drag_and_drop, scroll, noop")
    assert seen[0][1].startswith(f"Task: Press Yes, number {task.data['seed']}.\n")
    assert 'button "Yes"' in seen[0][1]
    said = [one[-1].partition("\n")[0] for one in seen[1:]]
    assert said[0].startswith("Error: SyntaxError: ")
    assert said[1:] == [f"Error: NameError: Invalid action type '{name}'." for name in ("goto", "upload_file")]


async def test_a_wrong_action_and_a_limit_of_steps_fail(environment: BrowserGym, play: Play) -> None:
    task = whole_tasks(environment, "eval")[0]
    assert await play(environment, task, "click('no')") == Outcome(-1.0, {"steps": 1, "raw_reward": 0})
    assert await play(environment, task, "noop()", steps=2) == Outcome(-1.0, {"steps": 2, "raw_reward": 0})
    assert browsers(below(os.getpid())) == []


async def test_a_task_that_does_not_start_is_the_environments_fault(
    environment: BrowserGym, tmp_path: Path, play: Play
) -> None:
    broken = BrowserGym(pages=("broken",), folder=str(tmp_path / "html"))
    with pytest.raises(EnvironmentFault, match="BrowserGym failed: RuntimeError: no such task"):
        await play(broken, whole_tasks(broken, "train")[0], "noop()")


def test_a_page_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"pages: there is no .*missing\.html"):
        load("browsergym", {"pages": ["missing"], "folder": str(tmp_path)})


def test_a_seed_makes_the_same_tasks_and_no_task_is_in_both_splits(environment: BrowserGym) -> None:
    train, held_out = ({task.id for task in whole_tasks(environment, split)} for split in ("train", "eval"))
    assert (len(train), len(held_out), train & held_out) == (2048, 200, set())
    assert {task.id for task in environment.tasks("train")} == train

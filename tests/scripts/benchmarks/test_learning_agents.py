"""Report of the learning of agents: the table of its readings, and the picture."""

import argparse
import json
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.learning_agents import AIMS, CREDITS, MINIATURES, Reading, Run, plot, read, table
from openclaw_rl.agents.environment import load
from openclaw_rl.settings import Settings


def reading(tasks: str, credit: str, seed: int, steps: int, passed: float, greedy: float | None = None) -> Reading:
    low, high = passed - 0.1, passed + 0.1
    return Reading(tasks, credit, seed, steps, 8 * steps, 10.0 * steps, passed, low, high, 200, {}, greedy)


READINGS = [
    reading("toolcall_mini", "outcome", 0, 0, 0.4, 0.5),
    reading("toolcall_mini", "outcome", 1, 0, 0.42),
    reading("toolcall_mini", "outcome", 0, 5, 0.9, 0.95),
    reading("toolcall_mini", "outcome", 1, 4, 0.8),
    reading("terminal_find", "both", 0, 0, 0.1),
]


def test_the_table_has_each_run_and_the_mean_of_the_seeds_last_readings() -> None:
    lines = table(READINGS).splitlines()
    assert lines[2:] == [
        "| `toolcall_mini` | outcome | 0 | 0: 0.40, 5: 0.90 | 0.90 [0.80, 1.00], 50 s | 0.50 → 0.95 | 0.90 |",
        "| `toolcall_mini` | outcome | 1 | 0: 0.42, 4: 0.80 | 0.80 [0.70, 0.90], 40 s |  | 0.90 |",
        "| `toolcall_mini` | outcome | mean of 2 | | **0.85** | | 0.90 |",
        "| `terminal_find` | both | 0 | 0: 0.10 | 0.10 [0.00, 0.20], 0 s |  | – |",
    ]  # a run that has not trained yet has no mean


def test_a_run_that_was_played_again_has_its_last_readings(tmp_path: Path) -> None:
    again = [reading("toolcall_mini", "outcome", 0, 0, 0.3), reading("toolcall_mini", "outcome", 0, 6, 0.7)]
    lines = [json.dumps(asdict(one)) for one in (*READINGS, *again)]
    (tmp_path / "found.jsonl").write_text("\n".join(['{"machine": {}}', *lines]) + "\n")
    assert sorted(map(repr, read(tmp_path / "found.jsonl"))) == sorted(map(repr, [READINGS[1], *READINGS[3:], *again]))
    assert read(tmp_path / "none.jsonl") == []


def test_the_picture_has_a_panel_for_each_environment(tmp_path: Path) -> None:
    plot(READINGS, tmp_path / "curves")
    drawn = (tmp_path / "curves.svg").read_text()
    assert all(f"<!-- {words} -->" in drawn for words in ("toolcall_mini", "terminal_find", "outcome", "both"))


@pytest.mark.parametrize("name", MINIATURES)
def test_each_environment_exists_with_enough_held_out_tasks(name: str) -> None:
    tasks = load(name, {"seed": 1}).tasks("eval")
    assert len({task.id for task in tasks}) == 200
    assert set(AIMS) < set(MINIATURES)


@pytest.mark.parametrize("credit", CREDITS)
def test_each_kind_of_credit_is_a_choice_of_the_methods_settings(credit: str) -> None:
    keys = {name.removeprefix("method."): value for name, value in CREDITS[credit].items()}
    method = Settings(method={"name": "agent", **keys}).method
    assert all(str(getattr(method, name)) in (value, f"{value}.0") for name, value in keys.items())


def test_a_run_may_have_other_settings_of_the_server_and_of_the_environment(tmp_path: Path) -> None:
    changed = "trainer.kl_coef=0.03 options.show_test=true"
    run = Run("swe_mini", f"grpo, {changed}", 0, tmp_path / "run", argparse.Namespace())
    assert run._settings == CREDITS["grpo"] | {"trainer.kl_coef": "0.03"}
    assert tomllib.loads(run._environment) == {"show_test": True}

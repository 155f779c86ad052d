"""Word problems: from a JSON file, and from data sets that the real package loads from folders."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openclaw_rl.cli.main import app
from openclaw_rl.offline.personas import ExperimentError, Problem
from openclaw_rl.offline.problems import problems

TWO = [{"question": "1?", "answer": "One, so\n#### 1"}, {"question": "2?", "answer": "#### 2,000"}]


def data_set(folder: Path, **splits: list[dict[str, str]]) -> Path:
    folder.mkdir(parents=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_problems_are_the_first_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps([{"question": "1?", "answer": 1}, {"question": "2?", "answer": "2"}]))
    assert problems(file, 1) == (Problem("1?", "1"),)
    assert len(problems(str(file))) == 2


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"question": "1?"}]', '[{"question": "1?", "answer": "a few"}]', "no"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(ExperimentError, match="holds no problems"):
        problems(file)


def test_a_file_that_is_not_there_is_no_name_of_a_data_set(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"none\.json holds no problems: FileNotFoundError"):
        problems(tmp_path / "none.json")


def test_a_data_set_has_its_answers_behind_the_mark_and_its_test_split_first(tmp_path: Path) -> None:
    folder = data_set(tmp_path / "set", train=[{"question": "0?", "answer": "#### 0"}], test=TWO)
    assert problems(folder) == (Problem("1?", "1"), Problem("2?", "2,000"))
    assert problems(str(folder), 1) == (Problem("1?", "1"),)


def test_a_data_set_may_have_several_configurations(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for number, name in enumerate(("easy", "main")):
        data_set(folder / name, test=[TWO[number]])
    named = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("easy", "main"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{named}---\n")
    assert problems(folder) == (Problem("2?", "2,000"),)
    assert problems(f"{folder}:easy") == (Problem("1?", "1"),)


@pytest.mark.parametrize("rows", [[{"text": "no question"}], [{"question": "1?", "answer": "#### one"}]])
def test_a_data_set_of_another_kind_is_refused(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    with pytest.raises(ExperimentError, match="holds no problems"):
        problems(data_set(tmp_path / "set", test=rows))


def test_a_data_set_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExperimentError, match=r"the data set .*empty cannot be loaded"):
        problems(tmp_path / "empty")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ExperimentError, match=r'openai/gsm8k is no file.*pip install "openclaw-rl\[datasets\]"'):
        problems("openai/gsm8k", 1)


def test_the_command_tells_what_is_missing_before_it_asks_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    asked = ["experiment", "personalization", "--url", "http://127.0.0.1:9", "--problems", "openai/gsm8k"]
    done = CliRunner().invoke(app, [*asked, "--checks", "2"])
    assert done.exit_code == 2
    assert "openclaw-rl[datasets]" in done.output

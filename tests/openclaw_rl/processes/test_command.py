"""The command line of a supervised child, for each way to find `child_main`."""

import sys
from pathlib import Path

import pytest

from openclaw_rl.processes import child_main
from openclaw_rl.processes.command import ChildCommand, ModuleSearch, last_line


def test_a_child_of_this_environment_runs_the_module_behind_child_main() -> None:
    command = ChildCommand("a.module", ("--config", "file"))
    assert command.argv() == [sys.executable, "-m", child_main.__name__, "a.module", "--config", "file"]


@pytest.mark.parametrize(("search", "flag"), [(ModuleSearch.BY_PATH, "-P"), (ModuleSearch.ISOLATED, "-I")])
def test_another_interpreter_runs_child_main_by_its_path_and_sets_the_variables(
    search: ModuleSearch, flag: str
) -> None:
    command = ChildCommand("a.module", ("x",), "/other/python", {"A": "1", "B": "two words"}, search)
    path = child_main.__file__
    variables = ["--env", "A=1", "--env", "B=two words"]
    assert command.argv() == ["/other/python", flag, path, *variables, "a.module", "x"]


def test_the_last_line_skips_empty_lines_and_a_missing_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == "it said nothing"
    log.write_text("one\ntwo\n\n \n")
    assert last_line(log) == "two"

"""The command line of a supervised child, for each way to find `child_main`."""

import sys
from pathlib import Path

import pytest

from openclaw_rl.processes import child_main
from openclaw_rl.processes.command import ChildCommand, ModuleSearch, last_error


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


def test_the_last_error_names_its_file_and_is_not_the_line_about_killed_processes(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert last_error(log) == f"it said nothing ({log})"
    log.write_text("one\ntwo\n\n \n")
    assert last_error(log) == f"two ({log})"
    cause = "AttributeError: 'Gemma2Config' object has no attribute 'hidden_act'"
    log.write_text(f"ready\n{cause}\nkill_process_tree called: parent_pid=1836, include_parent=True, pid=1836\n")
    assert last_error(log) == f"{cause} ({log})"


def test_the_last_error_of_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    log.write_text("ValueError: old\n" + "step 1\n" * 20_000 + "é done\n")
    assert last_error(log) == f"é done ({log})"

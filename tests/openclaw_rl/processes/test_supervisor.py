"""Supervised children: restarted when they die, stopped when asked, gone when their parent is killed."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes_below import lives
from structlog.testing import capture_logs
from waiting import until

from openclaw_rl.processes import supervisor
from openclaw_rl.processes.command import ChildCommand, ModuleSearch
from openclaw_rl.processes.supervisor import SAID_QUICK_EXITS, Child

CHILD = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)\n"


def module(folder: Path, source: str = CHILD) -> str:
    (folder / "a_child.py").write_text(source)
    return "a_child"


def pids(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


async def test_a_killed_child_is_started_again_and_stop_ends_it(tmp_path: Path) -> None:
    exits = []

    async def on_exit() -> None:
        exits.append(child.status().last_exit)

    seen = tmp_path / "pids"
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        child = Child("c", ChildCommand(module(tmp_path), (str(seen),)), log_file=tmp_path / "log", on_exit=on_exit)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(child.run())
            await until(lambda: len(pids(seen)) == 1)
            os.kill(pids(seen)[0], signal.SIGKILL)
            await until(lambda: len(pids(seen)) == 2)
            assert exits == [-signal.SIGKILL]
            assert child.status().restarts == 1
            await until(lambda: child.status().pid == pids(seen)[1])
            await child.stop()
            await task
        assert not lives(pids(seen)[1])
    finally:
        del os.environ["PYTHONPATH"]


async def test_a_child_that_cannot_live_is_said_three_times_and_once_when_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    source = f"import pathlib, sys\npathlib.Path(sys.argv[2]).exists() or sys.exit(3)\n{CHILD}"
    seen, may_live = tmp_path / "pids", tmp_path / "may live"
    child = Child("c", ChildCommand(module(tmp_path, source), (str(seen), str(may_live))), log_file=tmp_path / "log")
    with capture_logs() as lines:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(child.run())
            await until(lambda: child.status().quick_exits >= 4)
            assert child.status().last_exit == 3
            may_live.touch()
            await until(lambda: bool(pids(seen)))
            assert child.status().quick_exits >= 4, "that it runs is no proof yet"
            child.worked()
            child.worked()
            assert child.status().quick_exits == 0
            await child.stop()
            await task
    said = [(line["event"], line["log_level"]) for line in lines if line["event"] != "child_started"]
    assert said.count(("child_exited", "warning")) == SAID_QUICK_EXITS
    assert said.count(("child_works_again", "info")) == 1


async def test_a_child_that_lives_long_enough_works_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(supervisor, "HEALTHY_AFTER_S", 0.5)
    seen = tmp_path / "pids"
    child = Child("c", ChildCommand(module(tmp_path), (str(seen),)), log_file=tmp_path / "log")
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(child.run())
        await until(lambda: len(pids(seen)) == 1)
        os.kill(pids(seen)[0], signal.SIGKILL)
        await until(lambda: len(pids(seen)) == 2)
        await until(lambda: child.status().quick_exits == 0)
        await until(lambda: child.status().pid == pids(seen)[1])
        await child.stop()
        await task


async def test_a_child_leaves_when_its_parent_is_killed(tmp_path: Path) -> None:
    seen = tmp_path / "pids"
    command = ChildCommand(module(tmp_path), (str(seen),))
    child = (
        f"Child('c', ChildCommand({command.module!r}, {command.arguments!r}), log_file=Path({str(tmp_path / 'log')!r}))"
    )
    parent_source = (
        "import asyncio\nfrom pathlib import Path\nfrom openclaw_rl.processes.command import ChildCommand\n"
        "from openclaw_rl.processes.supervisor import Child\n"
        f"asyncio.run({child}.run())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_source], env=os.environ | {"PYTHONPATH": str(tmp_path)})
    try:
        await until(lambda: len(pids(seen)) == 1)
        parent.kill()
        parent.wait()
        await until(lambda: not lives(pids(seen)[0]))
    finally:
        parent.kill()
        for pid in pids(seen):
            if lives(pid):
                os.kill(pid, signal.SIGKILL)


def environment_with(root: Path, name: str, source: str) -> Path:
    """Return the interpreter of a fresh environment that has this one module."""
    (root / f"{name}.py").write_text(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
    (next((root / "venv" / "lib").glob("python3*")) / "site-packages" / "there.pth").write_text(f"{root}\n")
    return root / "venv" / "bin" / "python"


async def test_a_foreign_interpreter_needs_none_of_our_packages_and_gets_its_variables(tmp_path: Path) -> None:
    """The child runs like SGLang's: isolated from our PYTHONPATH, with the module as the main one."""
    source = (
        "import os, sys\n"
        "print(sys.flags.isolated, os.environ['A_SWITCH'], 'openclaw_rl' in sys.modules, __name__, sys.argv[1:])\n"
    )
    child = Child(
        "c",
        ChildCommand(
            "foreign_module",
            ("--flag", "value"),
            str(environment_with(tmp_path, "foreign_module", source)),
            {"A_SWITCH": "off"},
            ModuleSearch.ISOLATED,
        ),
        log_file=tmp_path / "log",
    )
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(child.run())
        await until(lambda: "it said nothing" not in child.last_error())
        task.cancel()
    assert child.last_error().startswith("1 off False __main__ ['--flag', 'value'] (")


async def test_what_a_killed_child_left_behind_is_ended_too(tmp_path: Path) -> None:
    """An engine's workers hold its GPU memory."""
    source = (
        "import os, subprocess, sys, time\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'a').write(f'{os.getpid()} {worker.pid}\\n'); time.sleep(600)\n"
    )
    seen = tmp_path / "pids"
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        child = Child("c", ChildCommand(module(tmp_path, source), (str(seen),)), log_file=tmp_path / "log")
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(child.run())
            await until(lambda: seen.exists() and seen.read_text().count("\n") == 1)
            own, worker = map(int, seen.read_text().split())
            os.kill(own, signal.SIGKILL)
            await until(lambda: not lives(worker))
            task.cancel()
    finally:
        del os.environ["PYTHONPATH"]


async def test_a_stop_in_the_pause_of_a_child_that_cannot_live_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 3600.0)
    child = Child("c", ChildCommand(module(tmp_path, "raise SystemExit(3)"), ()), log_file=tmp_path / "log")
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.run())
        await until(lambda: child.status().restarts == 1)
        await child.stop()
    assert child.status().last_exit == 3


async def test_a_stop_while_the_next_command_is_made_waits_for_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    asked, never = asyncio.Event(), asyncio.Event()

    async def on_exit() -> None:
        asked.set()
        await never.wait()

    command = ChildCommand(module(tmp_path, "raise SystemExit(3)"), ())
    child = Child("c", command, log_file=tmp_path / "log", on_exit=on_exit)
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.run())
        await asked.wait()
        await child.stop()


async def test_a_stop_during_a_start_ends_the_process_that_came_of_it(tmp_path: Path) -> None:
    seen = tmp_path / "pids"
    child = Child("c", ChildCommand(module(tmp_path), (str(seen),)), log_file=tmp_path / "log")
    spawn = child._spawn

    async def spawned() -> asyncio.subprocess.Process:
        await child.stop()  # it finds no process
        return await spawn()

    child._spawn = spawned  # type: ignore[method-assign]
    async with asyncio.timeout(120):
        await child.run()
    assert child.status().pid is None

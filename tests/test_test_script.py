"""`scripts/test.sh` over stand-ins for the programs that it runs: its exit codes, and the processes that it ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "test.sh"
PYTHON = """#!{python} -S
import os, subprocess, sys
if sys.argv[1] == "scripts/house.py":
    print("house is over")
    sys.exit(3 if os.environ.get("FAILING") == "house" else 0)
if "--collect-only" in sys.argv:
    os.makedirs("tests/__pycache__", exist_ok=True)
    with open("tests/__pycache__/collected", "a") as file:
        file.write("collected\\n")
    sys.exit(0)
name = "rest" if "--ignore" in sys.argv else "chaos"
child = subprocess.Popen(["sleep", os.environ.get("SLEEP_S", "600")])
for which, pid in (("child", child.pid), ("pid", os.getpid())):
    with open(f"{{os.environ['FILES']}}/{{name}}.tmp", "w") as file:
        file.write(str(pid))
    os.rename(file.name, f"{{os.environ['FILES']}}/{{name}}.{{which}}")
child.wait()
print(name, "is over")
sys.exit(3 if os.environ.get("FAILING") == name else 0)
"""
CHECK = """#!/bin/sh
echo {name} is over
[ "$FAILING" != {name} ] || exit 3
"""


def hears_ctrl_c() -> None:
    """As under a terminal. A job of a shell without job control ignores SIGINT, and what it starts does so too: these
    tests may be run by one, or after others that changed it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class Script:
    def __init__(self, folder: Path) -> None:
        self.files, self.collected = folder / "files", folder / "tests" / "__pycache__" / "collected"
        (folder / "scripts").mkdir()
        (folder / "bin").mkdir()
        self.files.mkdir()
        shutil.copy(SCRIPT, folder / "scripts")
        (folder / "scripts" / "venv.sh").write_text(f"ROOT={folder}\nensure_venv() {{ :; }}\n")
        for name in ("ruff", "mypy", "lint-imports", "python"):
            script = PYTHON.format(python=sys.executable) if name == "python" else CHECK.format(name=name)
            (folder / "bin" / name).write_text(script)
            (folder / "bin" / name).chmod(0o755)
        self._command = ["bash", str(folder / "scripts" / "test.sh")]
        self._environ = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FILES": str(self.files)}

    def start(self, **environ: str) -> None:
        self.process = subprocess.Popen(
            self._command,
            env=self._environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=hears_ctrl_c,
        )

    def pid(self, name: str) -> int:
        until(lambda: (self.files / name).is_file())
        return int((self.files / name).read_text())


def until(is_so: Callable[[], bool], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    yield script
    script.process.kill()
    for file in script.files.iterdir():  # what it left, and what holds its output open
        if not is_gone(int(file.read_text())):
            os.kill(int(file.read_text()), signal.SIGKILL)
    script.process.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_chaos_run_beside_ends_with_the_tests(script: Script, number: int, code: int) -> None:
    script.start()
    pids = [script.pid(f"{name}.{which}") for name in ("chaos", "rest") for which in ("pid", "child")]
    os.killpg(script.process.pid, number)  # as a terminal's Ctrl-C does: the foreground's group
    assert script.process.wait(120) == code
    for pid in pids:
        until(lambda pid=pid: is_gone(pid))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, 137)])
def test_it_ends_with_its_tests_when_the_signal_reached_them_alone(script: Script, number: int, code: int) -> None:
    script.start()
    pids = [script.pid(f"{name}.{which}") for name in ("chaos", "rest") for which in ("pid", "child")]
    os.kill(pids[2], number)
    assert script.process.wait(120) == code  # the chaos stand-in would go on for ten minutes
    for pid in pids[:2]:
        until(lambda pid=pid: is_gone(pid))


@pytest.mark.parametrize("failing", ["", "rest", "chaos", "mypy", "lint-imports", "house"])
def test_its_exit_code_is_that_of_what_failed(script: Script, failing: str) -> None:
    script.start(SLEEP_S="0.1", FAILING=failing)
    output, _ = script.process.communicate(timeout=120)
    assert script.process.returncode == (3 if failing else 0)
    for name in ("rest", "chaos", "mypy", "lint-imports", "house"):
        assert f"{name} is over" in output


def test_one_process_compiles_the_tests_of_a_fresh_clone(script: Script) -> None:
    for _ in range(2):
        script.start(SLEEP_S="0.1")
        script.process.communicate(timeout=120)
        assert script.process.returncode == 0
        assert script.collected.read_text() == "collected\n"

"""`--help` of each benchmark, end-to-end check and GPU check, and their shell entry points from any directory."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAIN = 'if __name__ == "__main__":'
MODULES = {
    package: sorted(
        file.stem for file in (ROOT / "scripts" / package).glob("*.py") if MAIN in file.read_text().splitlines()
    )
    for package in ("benchmarks", "e2e")
}


def shell(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    argv = [str(ROOT / words[0]), *words[1:]]
    return subprocess.run(argv, env=os.environ | {"PATH": path}, cwd=cwd, capture_output=True, text=True, timeout=550)


@pytest.mark.parametrize("module", [f"{package}.{name}" for package, names in MODULES.items() for name in names])
def test_a_module_answers_help_with_its_command_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, _, name = module.partition(".")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main()
    assert ended.value.code == 0
    assert f"scripts/{package}.sh {name} " in capsys.readouterr().out


@pytest.mark.parametrize("package", MODULES)
def test_an_entry_point_lists_its_modules(package: str, tmp_path: Path) -> None:
    assert shell(f"scripts/{package}.sh", cwd=tmp_path).stdout.split() == MODULES[package]
    wrong = shell(f"scripts/{package}.sh", "nonsense", cwd=tmp_path)
    assert wrong.returncode == 2
    assert f"no {package}/nonsense.py" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("scripts/benchmarks.sh", "loop_latency", "--help"), "--chats"),
        (("scripts/gpu/sglang_check.sh", "--help"), "conformance"),
        (("scripts/gpu/node_check.sh", "--help"), "engine_kill"),
    ],
)
def test_an_entry_point_answers_help_from_any_directory(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = shell(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert not list(tmp_path.iterdir())

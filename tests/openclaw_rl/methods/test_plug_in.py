"""A method of another package owns its settings. `tests/integration/test_methods.py` serves and trains with it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from plug_in import LENGTH, install

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def openclaw_rl(tmp_path: Path) -> Run:
    install(tmp_path / "site", "length", LENGTH)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1"}
        argv = [sys.executable, "-m", "openclaw_rl", *words]
        return subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)

    return run


def test_the_command_shows_its_keys_with_their_meaning_and_those_of_every_method(openclaw_rl: Run) -> None:
    shown = openclaw_rl("settings", "--set", "method.name=length", "--set", "method.target_tokens=4")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert "method.target_tokens = 4    # Length in tokens that earns the full reward." in lines
    assert any(line.startswith("method.demonstration_weight = 1.0    # ") for line in lines)
    assert not any(line.startswith("method.baseline") for line in lines)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("method.target_tokens=0", "method.target_tokens: Input should be greater than or equal to 1 (it is 0)"),
        ("method.target=4", "method.target: no such setting"),
        ("method.opd_clip=4", "method.opd_clip: it belongs to opd and combine, and method.name is length"),
        ("training.weights=full", "method.target_tokens is for adapters"),
    ],
)
def test_a_wrong_key_or_value_is_refused_at_start(openclaw_rl: Run, setting: str, says: str) -> None:
    for command in ("settings", "serve"):
        refused = openclaw_rl(command, "--set", "method.name=length", "--set", setting)
        assert (refused.returncode, says in refused.stderr) == (2, True), refused


def test_the_node_takes_it_too(openclaw_rl: Run, tmp_path: Path) -> None:
    code = (
        "from openclaw_slime.arguments import NodeOptions; from openclaw_slime.node import NodeConfig\n"
        "assert NodeOptions('m', method='length').method == 'length'\n"
        "from openclaw_rl.settings import TrainerSettings\n"
        "table = {'name': 'length', 'target_tokens': 3}\n"
        "given = {'url': 'http://s', 'token': 't', 'trainer': TrainerSettings(), 'method': table}\n"
        "assert NodeConfig.model_validate(given).method.target_tokens == 3\n"
    )
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

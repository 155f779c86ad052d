"""The methods' launch scripts on the embedded default, as a user calls them."""

import shlex
import subprocess
from pathlib import Path

import pytest

from openclaw_rl.settings import MethodSettings, TrainerSettings

ROOT = Path(__file__).resolve().parents[1]
PRINTED = {
    "openclaw-rl/run_embedded_rl.sh": "openclaw-rl serve --method binary_rl --set method.baseline=others"
    " --set trainer.learning_rate=1e-3 --set trainer.kl_coef=0.1",
    "openclaw-opd/run_embedded_opd.sh": "openclaw-rl serve --method opd",
    "openclaw-combine/run_embedded_combine.sh": "openclaw-rl serve --method combine",
}


def dry_run(script: str, *arguments: str) -> str:
    argv = [str(ROOT / script), "--dry-run", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120, cwd="/").stdout.strip()


@pytest.mark.parametrize("script", PRINTED)
def test_dry_run_prints_the_command_line(script: str) -> None:
    assert dry_run(script) == PRINTED[script]


@pytest.mark.parametrize("script", PRINTED)
def test_what_the_user_says_comes_last(script: str) -> None:
    assert dry_run(script, "--port", "0", "--set", "a.b=c") == f"{PRINTED[script]} --port 0 --set a.b=c"


def test_what_the_scripts_ship_is_what_was_measured() -> None:
    """OPD and Combined name a method and nothing else: the settings' own defaults must be those of the table that says
    what each method teaches (`openclaw-opd/README.md`). Binary RL's own are in its line above."""
    method, trainer = MethodSettings(), TrainerSettings()
    assert (method.teacher, method.hint_source, method.opd_clip, method.opd_weight) == ("base", "verbatim", 2.0, 1.0)
    assert (method.binary_weight, method.baseline, method.baseline_limit) == (0.3, "ema", 1.0)
    assert (trainer.learning_rate, trainer.kl_coef) == (3e-4, 0.0)


@pytest.mark.parametrize("script", PRINTED)
def test_scripts_name_no_place_of_a_machine(script: str) -> None:
    text = (ROOT / script).read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert not [word for word in shlex.split(text, comments=True) if word.startswith(("/", "~"))]

"""The methods' launch scripts on the embedded default, as a user calls them."""

import shlex
import subprocess
from pathlib import Path

import pytest

from openclaw_rl.settings import MethodSettings

ROOT = Path(__file__).resolve().parents[1]
OPD = "--set method.hint_source=verbatim --set method.teacher=base --set trainer.learning_rate=3e-4"
COMBINED = f"{OPD} --set method.binary_weight=0.3 --set method.baseline=ema"
PRINTED = {
    "openclaw-rl/run_embedded_rl.sh": "openclaw-rl serve --method binary_rl",
    "openclaw-opd/run_embedded_opd.sh": f"openclaw-rl serve --method opd {OPD}",
    "openclaw-combine/run_embedded_combine.sh": f"openclaw-rl serve --method combine {COMBINED}",
}


def dry_run(script: str, *arguments: str) -> str:
    argv = [str(ROOT / script), "--dry-run", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60, cwd="/").stdout.strip()


@pytest.mark.parametrize("script", PRINTED)
def test_dry_run_prints_the_command_line(script: str) -> None:
    assert dry_run(script) == PRINTED[script]


@pytest.mark.parametrize("script", PRINTED)
def test_what_the_user_says_comes_last(script: str) -> None:
    assert dry_run(script, "--port", "0", "--set", "a.b=c") == f"{PRINTED[script]} --port 0 --set a.b=c"


@pytest.mark.parametrize("script", PRINTED)
def test_the_settings_exist(script: str) -> None:
    words = shlex.split(PRINTED[script])
    pairs = [words[k + 1].split("=", 1) for k, word in enumerate(words) if word == "--set"]
    own = {key.removeprefix("method."): value for key, value in pairs if key.startswith("method.")}
    MethodSettings.model_validate({"name": words[words.index("--method") + 1], **own})


@pytest.mark.parametrize("script", PRINTED)
def test_scripts_name_no_place_of_a_machine(script: str) -> None:
    text = (ROOT / script).read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert not [word for word in shlex.split(text, comments=True) if word.startswith(("/", "~"))]

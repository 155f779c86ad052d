"""Launch scripts of the methods on the embedded default, as a user calls them."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openclaw_rl.cli.main import app
from openclaw_rl.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
PRINTED = {
    "scripts/serve.sh": "openclaw-rl serve",
    "openclaw-rl/run_embedded_rl.sh": "openclaw-rl serve --method binary_rl",
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


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Settings]:
    """Return the settings with which a script's command line would serve."""
    given: list[Settings] = []

    async def run(settings: Settings) -> None:
        given.append(settings)

    monkeypatch.chdir(tmp_path)  # no openclaw-rl.toml
    monkeypatch.setattr("openclaw_rl.server.app.run", run)

    def settings_of(script: str, *arguments: str) -> Settings:
        result = CliRunner().invoke(app, dry_run(script, *arguments).split()[1:])
        assert result.exit_code == 0, result.output
        return given[-1]

    return settings_of


@pytest.mark.parametrize("script", ["openclaw-opd/run_embedded_opd.sh", "openclaw-combine/run_embedded_combine.sh"])
def test_opd_and_combined_ship_what_was_measured(script: str, served: Callable[..., Settings]) -> None:
    """The settings are those of the table in `openclaw-opd/README.md`."""
    method, trainer = served(script).method, served(script).trainer
    assert (method.teacher, method.hint_source, method.opd_clip) == ("base", "verbatim", 2.0)
    if method.name == "combine":  # Combined alone has weights and a baseline
        assert (method.opd_weight, method.binary_weight) == (1.0, 0.3)
        assert (method.baseline, method.baseline_limit) == ("ema", 1.0)
    assert (trainer.learning_rate, trainer.kl_coef) == (2e-4 if method.name == "opd" else 3e-4, 0.0)


@pytest.mark.parametrize("script", ["scripts/serve.sh", "openclaw-rl/run_embedded_rl.sh"])
def test_who_only_serves_gets_the_binary_rl_that_teaches(script: str, served: Callable[..., Settings]) -> None:
    settings = served(script)
    assert settings.method.name == "binary_rl"
    assert (settings.method.baseline, settings.trainer.learning_rate, settings.trainer.kl_coef) == ("others", 1e-3, 0.1)
    assert settings.publisher.max_step_kl == 1.0
    own = served(script, "--set", "trainer.learning_rate=3e-4")
    assert (own.method.baseline, own.trainer.learning_rate) == ("others", 3e-4)
    other = served(script, "--model", "some/model")
    assert (other.method.baseline, other.trainer.learning_rate, other.trainer.kl_coef) == ("ema", 3e-4, 0.0)


@pytest.mark.parametrize("script", PRINTED)
def test_scripts_name_no_place_of_a_machine(script: str) -> None:
    text = (ROOT / script).read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert not [word for word in shlex.split(text, comments=True) if word.startswith(("/", "~"))]

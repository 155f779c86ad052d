"""Launch scripts of a LoRA on one GPU, as a user calls them: they run the command line that they print."""

import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from openclaw_rl.cli.options import parse_sets
from openclaw_rl.settings import load

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "binary_rl": "openclaw-rl/run_qwen3_4b_openclaw_rl_lora.sh",
    "opd": "openclaw-opd/run_qwen3_4b_openclaw_opd_lora.sh",
    "combine": "openclaw-combine/run_qwen3_4b_openclaw_combine_lora.sh",
}


def launch(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, **variables}
    return subprocess.run(
        [ROOT / script, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False, cwd="/"
    )


def printed(script: str, *arguments: str, **variables: str) -> list[str]:
    done = launch(script, "--dry-run", *arguments, HF_CKPT="M", **variables)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def sets(words: list[str]) -> list[str]:
    return [value for flag, value in itertools.pairwise(words) if flag == "--set"]


@pytest.mark.parametrize("method", SCRIPTS)
def test_dry_run_prints_what_the_server_takes(method):
    words = printed(SCRIPTS[method])
    assert words[1:8] == ["-m", "openclaw_rl", "serve", "--method", method, "--model", "M"]
    settings = load(None, {"engine.kind": "sglang", "method.name": method, **parse_sets(sets(words))}, {})
    assert (settings.trainer.device, settings.training.batch_size, settings.judge.votes) == ("cuda", 16, 3)


def test_variables_reach_their_settings(tmp_path):
    words = printed(
        SCRIPTS["opd"], ENGINE_PYTHON=sys.executable, SAVE_CKPT=str(tmp_path), BATCH_SIZE="2", TOP_K="20", PRM_M="1",
        PRM_URL="http://127.0.0.1:1/v1", LR="1e-5",
    )  # fmt: skip
    settings = load(None, {"engine.kind": "sglang", "method.name": "opd", **parse_sets(sets(words))}, {})
    assert (settings.training.batch_size, settings.training.min_batch) == (2, 2)
    assert (settings.method.top_k, settings.judge.votes, settings.judge.quorum) == (20, 1, 1)
    assert (settings.trainer.learning_rate, settings.engine.python) == (1e-5, sys.executable)
    assert words[words.index("--data-dir") + 1] == str(tmp_path)


def test_what_the_user_says_comes_last():
    assert printed(SCRIPTS["combine"], "--set", "trainer.rank=4")[-2:] == ["--set", "trainer.rank=4"]


def test_the_model_is_needed():
    done = launch(SCRIPTS["binary_rl"], "--dry-run")
    assert done.returncode == 2
    assert "HF_CKPT is needed" in done.stderr


def test_no_secret_is_printed():
    assert "sk-secret" not in " ".join(printed(SCRIPTS["binary_rl"], SGLANG_API_KEY="sk-secret"))


@pytest.mark.parametrize("script", ["scripts/lora.sh", "slime/launch.sh"])
@pytest.mark.parametrize("key", ["plain", 'a"b', "a\\b", 'end\\"'])
def test_a_key_may_hold_quotes_and_backslashes(script, key):
    text = (ROOT / script).read_text()
    begin = text.index('if [ -n "${SGLANG_API_KEY')
    part = text[begin : text.index("\nfi\n", begin) + 4]
    done = subprocess.run(
        ["bash", "-c", part + 'printf %s "$OPENCLAW_RL__SERVER__API_KEYS"'],
        env={**os.environ, "SGLANG_API_KEY": key}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    settings = load(None, {}, {"OPENCLAW_RL__SERVER__API_KEYS": done.stdout})
    assert [found.key.get_secret_value() for found in settings.server.api_keys] == [key]


@pytest.mark.parametrize("script", [*SCRIPTS.values(), "scripts/lora.sh"])
def test_scripts_kill_nothing_and_name_no_place_of_their_own(script):
    text = (ROOT / script).read_text()
    assert not any(word in text for word in ("pkill", "killall", "kill -9", "set -x", "/home/", "/data"))

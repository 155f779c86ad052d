"""Scripts of agents' runs, as a user calls them: the runner reads their plans, and their values are the public ones."""

import os
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from openclaw_rl.agents import environment, plan
from openclaw_rl.agents.plan import Plan
from openclaw_rl.settings import load

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "agents"
NODE = {
    # groups of a step, group size, steps, KL, weight of the judge, environment
    "terminal-rl_qwen3-8b": ("16", 8, 10, "0.01", "0", "harbor"),
    "terminal-rl_qwen3-8b_prm": ("16", 8, 10, "0.01", "1", "harbor"),
    "swe-rl_qwen3-8b": ("8", 4, 20, "0", "1", "mini_swe"),
    "swe-rl_qwen3-32b": ("8", 4, 20, "0", "1", "mini_swe"),
    "toolcall-rl_qwen3-4b": ("32", 8, 16, "0.01", "0", "python_tool"),
    "toolcall-rl_qwen3-4b_prm": ("32", 8, 16, "0.01", "1", "python_tool"),
    "gui-rl_qwen3vl-8b": ("8", 8, 30, "0.01", "1", "miniwob"),
}
OWN_TASKS = {"gui-rl_qwen3vl-8b"}
"""Scripts whose environment brings its tasks."""


def launch(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPTS / f"{script}.sh", *arguments],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
    )


def printed(script: str, folder: Path, *arguments: str, **variables: str) -> tuple[Plan, list[str], list[str]]:
    """Return the plan and the words of server and runner that a dry run prints."""
    done = launch(script, "--dry-run", *arguments, RUN=str(folder / "run"), **variables)
    assert done.returncode == 0, done.stderr
    *text, server, runner = done.stdout.splitlines()
    file = folder / "plan.toml"
    file.write_text("\n".join(text))
    assert not (folder / "run").exists()
    return plan.read(file), shlex.split(server), shlex.split(runner)


@pytest.mark.parametrize("script", NODE)
def test_a_node_has_the_public_values(script: str, tmp_path: Path) -> None:
    groups, size, steps, kl, weight, name = NODE[script]
    read, server, runner = printed(script, tmp_path, HF_CKPT="M", TASKS="T")
    values = dict(word.split("=", 1) for word in server[1:] if "=" in word)
    assert (values["METHOD"], values["LR"], values["TEMPERATURE"], values["KL_COEF"]) == ("agent", "1e-6", "1", kl)
    assert values["OPENCLAW_RL__EPISODES__GROUPS_PER_STEP"] == groups
    assert values["OPENCLAW_RL__METHOD__PROCESS_WEIGHT"] == weight
    assert int(values["BATCH_SIZE"]) == int(groups) * size * steps
    assert (read.train.group_size, read.limits.steps, read.environment) == (size, steps, name)
    options = {} if script in OWN_TASKS else {"tasks": "T"}
    assert (read.eval.every_versions, read.sampling["temperature"], read.options) == (20, 1, options)
    assert sum(int(values[f"{name}_GPUS"]) for name in ("ACTOR", "ROLLOUT", "PRM")) == 8
    assert runner[1:4] == ["-m", "openclaw_rl.cli.agents", "run"]


def sets(words: list[str]) -> dict[str, str]:
    """Return the settings of a command line."""
    found = dict(word.split("=", 1) for flag, word in pairwise(words) if flag == "--set")
    return found | ({"method.name": words[words.index("--method") + 1]} if "--method" in words else {})


@pytest.mark.parametrize("script", NODE)
def test_a_nodes_server_loads_its_settings(script: str, tmp_path: Path) -> None:
    groups, size, steps, kl, weight, _ = NODE[script]
    _, server, _ = printed(script, tmp_path, HF_CKPT="M", TASKS="T", PYTHON=sys.executable)
    environ = dict(word.split("=", 1) for word in server if word.startswith("OPENCLAW_RL__"))
    done = subprocess.run(
        [*server, "--dry-run"],
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    command = done.stdout.partition("\nserver\n")[2].partition("\n\n")[0]
    settings = load(None, sets(shlex.split(command.replace("\\\n", " "))), environ)
    assert (settings.method.name, settings.method.process_weight) == ("agent", float(weight))
    assert (settings.trainer.learning_rate, settings.trainer.kl_coef) == (1e-6, float(kl))
    assert settings.episodes.groups_per_step == int(groups)
    assert settings.episodes.max_groups_ahead == 2 * int(groups)
    samples = int(groups) * size * steps
    assert (settings.training.batch_size, settings.training.max_waiting) == (samples, 2 * samples)
    assert settings.sampling.temperature == 1


@pytest.mark.parametrize("name", ["terminal_mini", "swe_mini", "toolcall_mini", "gui_mini"])
def test_a_miniatures_server_has_what_learning_needs(name: str, tmp_path: Path) -> None:
    _, server, _ = printed(name, tmp_path)
    settings = load(None, sets(server), {})
    assert (settings.method.name, settings.method.process_weight) == ("agent", 1)
    assert (settings.trainer.learning_rate, settings.trainer.kl_coef) == (1e-3, 0.1)
    assert settings.publisher.max_step_kl == 1
    assert (settings.episodes.groups_per_step, settings.episodes.max_groups_ahead) == (8, 16)


@pytest.mark.parametrize("script", NODE)
def test_the_model_and_the_tasks_are_needed(script: str) -> None:
    for given, missing in (({}, "HF_CKPT"), ({"HF_CKPT": "M"}, "TASKS")):
        if missing == "TASKS" and script in OWN_TASKS:
            continue
        done = launch(script, "--dry-run", **given)
        assert (done.returncode, done.stderr) == (2, f"error: {missing} is needed\n")


def test_held_out_tasks_may_be_named(tmp_path: Path) -> None:
    read, _, _ = printed("swe-rl_qwen3-8b", tmp_path, HF_CKPT="M", TASKS="T", EVAL_TASKS="E")
    assert read.options == {"tasks": "T", "eval_tasks": "E"}


@pytest.mark.parametrize("name", ["terminal_mini", "swe_mini", "toolcall_mini", "gui_mini"])
def test_a_miniature_plays_eight_by_eight_on_the_bundled_model(name: str, tmp_path: Path) -> None:
    read, server, runner = printed(name, tmp_path, "--set", "a.b=c", PORT="4711")
    assert server[:4] == ["openclaw-rl", "serve", "--method", "agent"]
    assert server[-2:] == ["--set", "a.b=c"]
    assert runner[-1] == "http://127.0.0.1:4711"
    assert (read.environment, read.train.group_size, read.train.groups, read.eval.tasks) == (name, 8, 240, 200)
    made = environment.load(read.environment, read.options)
    assert len(environment.whole_tasks(made, "eval")) == 200


def test_the_interpreter_of_the_environments_is_made_by_pip(tmp_path: Path) -> None:
    done = launch("env", "--dry-run", str(tmp_path / "venv"))
    assert done.stdout.splitlines()[0] == f"python3.12 -m venv {tmp_path / 'venv'}"
    assert "harbor==0.26.0 mini-swe-agent==2.4.6" in done.stdout
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("kind", "with_their_own", "without"),
    [
        ("harbor", "harbor==0.26.0 mini-swe-agent==2.4.6", ""),
        ("tools", "verifiers==0.4.0 uv math-verify==0.9.0 playwright>=1.55", " bfcl-eval==2026.3.23 miniwob==1.1.0"),
        ("browsergym", "browsergym-core==0.14.3 browsergym-miniwob==0.14.3", " miniwob==1.1.0"),
    ],
)
def test_each_kind_of_environments_has_an_interpreter_of_its_own(kind: str, with_their_own: str, without: str) -> None:
    made, whole, alone = launch("env", "--dry-run", kind).stdout.splitlines()
    folder = ROOT / (".venv-agents" if kind == "harbor" else f".venv-agents-{kind}")
    assert made.endswith(f"-m venv {folder}")
    assert f" -m pip install {with_their_own} httpx " in whole
    assert alone == f"{folder}/bin/python -m pip install --no-deps --editable {ROOT}{without}"


def test_the_extra_of_browsergym_has_the_versions_of_its_interpreter() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = launch("env", "--dry-run", "browsergym").stdout.split()
    assert set(extras["browsergym"]) < set(told)


def test_scripts_name_no_place_of_a_machine() -> None:
    for script in SCRIPTS.glob("*.sh"):
        words = shlex.split(script.read_text(), comments=True)
        assert not [word for word in words if word.startswith(("/work", "/home", "/root", "~"))], script

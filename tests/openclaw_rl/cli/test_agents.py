"""`openclaw-rl agents` as a user calls it, against a fake of the server's episodes on a port."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_episodes import FakeEpisodes, served
from typer.testing import CliRunner

from openclaw_rl.agents import environment
from openclaw_rl.cli.main import app

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "instructions" / "agents-runner.md").read_text()


@pytest.fixture
def fake() -> FakeEpisodes:
    return FakeEpisodes(lambda task, messages: "echo pear" if "pear" in str(messages) else "echo fig")


@pytest.fixture
def url(fake: FakeEpisodes) -> Iterator[str]:
    with served(fake) as url:
        yield url


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the environment of the page, in 20 lines; return its name."""
    (code,) = re.findall(r"## Your environment in 20 lines\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.strip().splitlines()) <= 20
    (tmp_path / "echo_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(environment._SHIPPED, "echo", "echo_of_the_page:Echo")
    return "echo"


def plan(folder: Path, name: str, more: str = "") -> Path:
    file = folder / "plan.toml"
    # nice: these commands run in the process of the tests.
    file.write_text(f'environment = "{name}"\nfolder = "run"\nnice = 0\n{more}')
    return file


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["agents", *map(str, words)])
    return done.exit_code, done.output


def test_the_environment_of_the_page_is_played_evaluated_and_shown(
    fake: FakeEpisodes, url: str, echo: str, tmp_path: Path
) -> None:
    file = plan(tmp_path, echo, "[train]\ngroups = 4\ngroup_size = 2\n")
    code, said = run("run", file, "--server", url, "--key", "k")
    assert code == 0, said
    assert len(re.findall(r"^group \d/4 ", said, re.MULTILINE)) == 4
    for kept in fake.episodes.values():
        right = kept.body["task"] == "train/pear"
        assert kept.outcome == {"reward": 1.0 if right else -1.0, "truncated": False, "metrics": {}}
    assert fake.keys == {"Bearer k"}
    code, said = run("eval", file, "--server", url)
    assert (code, said.split("[")[0]) == (0, "eval  version 0  pass@1 1.000 ")
    code, said = run("status", file)
    assert code == 0
    assert re.search(r"^run \w+ of echo: 4 groups whole, of 4\nepisodes: 8 ended\n", said)
    assert "\n  training on version 0: reward " in said
    assert "eval  version 0" in said


def test_the_plan_of_the_page_is_read(tmp_path: Path) -> None:
    plans = re.findall(r"```toml\n(environment = .*?)```", PAGE, re.DOTALL)
    assert len(plans) == PAGE.count('\nenvironment = "')
    for text in plans:
        file = tmp_path / "plan.toml"
        file.write_text(text)
        code, said = run("status", file)
        assert (code, "no run in" in said) == (2, True), said


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("nonsense", "", "environment: there is no 'nonsense'; installed are "),
        ("terminal_mini", "[options]\nsize = 1", "options.size: terminal_mini takes train_tasks, eval_tasks, seed"),
        ("terminal_mini", "[train]\ngroups = 'x'", "train.groups: "),
        ("terminal_mini", 'python = "none/bin/python"', "is no interpreter; scripts/agents/env.sh makes one"),
        ("harbor", '[options]\ntasks = "."', "environment: harbor needs a package that this interpreter has not: "),
    ],
)
def test_what_cannot_run_is_one_line(tmp_path: Path, name: str, more: str, words: str) -> None:
    code, said = run("run", plan(tmp_path, name, more))
    assert code == 2
    assert len(said.strip().splitlines()) == 1
    assert words in said


def test_without_a_sandbox_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openclaw_rl.agents.sandbox.kinds.shutil.which", lambda *_, **__: None)
    code, said = run("run", plan(tmp_path, "terminal_mini", '[sandbox]\nkind = "bubblewrap"'))
    assert (code, "apt-get install bubblewrap" in said) == (2, True)


def test_a_stopped_run_aborts_what_it_plays_and_had_the_lowest_claim_to_the_cores(
    fake: FakeEpisodes, url: str, echo: str, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio\nfrom echo_of_the_page import Echo\n"
        "class Slow(Echo):\n    async def run(self, task, episode):\n        await asyncio.sleep(1000)\n"
    )
    info = tmp_path / "slow-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[openclaw_rl.environments]\nslow = slow:Slow\n")
    file = tmp_path / "slow.toml"
    file.write_text(f'environment = "slow"\nfolder = "run"\nserver = "{url}"\n[train]\ngroup_size = 2\n')
    argv = [sys.executable, "-m", "openclaw_rl", "agents", "run", str(file)]
    with subprocess.Popen(argv, env=os.environ | {"PYTHONPATH": str(tmp_path)}) as process:
        while len(fake.episodes) < 2 and process.poll() is None:
            time.sleep(0.02)
        niceness = os.getpriority(os.PRIO_PROCESS, process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert niceness >= 10
    assert {kept.aborted["reason"] for kept in fake.episodes.values() if kept.aborted} == {"the runner was stopped"}


@pytest.mark.parametrize("status", [401, 409])
def test_a_server_that_would_refuse_every_episode_ends_the_run(
    fake: FakeEpisodes, url: str, echo: str, tmp_path: Path, status: int
) -> None:
    fake.refuses = (status, "the method gives no credit", "method_gives_no_credit")
    code, said = run("run", plan(tmp_path, echo), "--server", url)
    assert code == 2
    assert f"openclaw-rl: {status}: the method gives no credit" in said


def test_the_plans_interpreter_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def execve(path: Path, argv: list[str], environ: dict[str, str]) -> None:
        assert environ["OPENCLAW_RL_AGENTS_KEY"] == "secret"
        started.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr("openclaw_rl.cli.agents.os.execve", execve)
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    file = plan(tmp_path, "harbor", 'python = "python"')
    assert run("eval", file, "--server", "http://s", "--key", "secret")[0] == 0
    words = ["-m", "openclaw_rl.cli.agents", "eval", str(file), "--server", "http://s"]
    assert started == [[str(other), *words]]

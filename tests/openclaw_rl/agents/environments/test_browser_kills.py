"""SIGKILL of the server or of the runner while an episode's page is open: no browser is left.

Real: the server, `openclaw-rl agents run`, both environments with pages, Chromium and bubblewrap. (SIGKILL of
MiniWoB's runner and of the parts below it: `test_miniwob.py`.)
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import browser_gym_stand_in
import pytest
from browsing import listening
from harness.host import Host, Server
from harness.model import Vocabulary
from harness.stubs import Stubs
from processes_below import below, program, wait_for_end

PATIENCE_S = 120.0
PLUGIN = """
from pathlib import Path
from openclaw_rl.agents.environments import browser_gym
from openclaw_rl.agents.environments.miniwob import MiniWob
browser_gym._WORLD = Path({world!r})
BrowserGym = browser_gym.BrowserGym
"""
CORE = """<script>
Math.seedrandom = () => undefined;
var WOB_DONE_GLOBAL = false, WOB_RAW_REWARD_GLOBAL = 0;
var core = { startEpisodeReal() {} };
</script><div id="query">Press Yes.</div>"""


@pytest.fixture
def holding(host: Host, model_folder: Path, tmp_path: Path) -> Iterator[tuple[Server, Stubs]]:
    """A server whose engine never answers."""
    stubs = Stubs({"engine": [{"text": "x", "delay_s": 3600}]}, Vocabulary.of(model_folder), pace=1.0)
    settings = {"engine.kind": "url", "trainer.kind": "external", "method.name": "agent"}
    with listening(stubs) as (url, _), host.running(tmp_path / "server", {**settings, "engine.url": url}) as server:
        yield server, stubs


@pytest.fixture
def start(tmp_path: Path, holding: tuple[Server, Stubs]) -> Callable[[str], "subprocess.Popen[bytes]"]:
    """`start(environment)`: a runner of its plan, in a process of its own."""
    folder = tmp_path / "plugin"
    info = folder / "held-0.dist-info"
    info.mkdir(parents=True)
    (folder / "held.py").write_text(PLUGIN.format(world=str(browser_gym_stand_in.world(tmp_path))))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: held\nVersion: 0\n")
    points = "held_browsergym = held:BrowserGym\nheld_miniwob = held:MiniWob\n"
    (info / "entry_points.txt").write_text(f"[openclaw_rl.environments]\n{points}")
    form = browser_gym_stand_in.pages(tmp_path / "html") / "miniwob" / "form.html"
    form.write_text(CORE + form.read_text())

    def started(environment: str) -> "subprocess.Popen[bytes]":
        plan = tmp_path / "plan.toml"
        plan.write_text(
            f'environment = "held_{environment}"\nfolder = "run"\nserver = "{holding[0].url}"\nnice = 0\n'
            f'[options]\npages = ["form"]\nfolder = "{tmp_path / "html"}"\n'
            "[train]\ngroups = 1\ngroup_size = 1\nretries = 0\n"
        )
        argv = [sys.executable, "-m", "openclaw_rl", "agents", "run", str(plan)]
        return subprocess.Popen(argv, env=os.environ | {"PYTHONPATH": str(folder)})

    return started


@pytest.mark.parametrize(
    ("environment", "victim"), [("miniwob", "server"), ("browsergym", "server"), ("browsergym", "runner")]
)
def test_no_browser_is_left_when_the_server_or_the_runner_is_killed(
    environment: str,
    victim: str,
    holding: tuple[Server, Stubs],
    start: Callable[[str], "subprocess.Popen[bytes]"],
) -> None:
    server, stubs = holding
    with start(environment) as runner:
        try:
            while not stubs.running:  # the page was shown, and the policy is asked
                assert runner.poll() is None
            family = below(runner.pid)
            theirs = [process for process in family if program(process) == "bwrap" or "chrom" in program(process)]
            assert theirs
            if victim == "server":
                server.kill()
                if (
                    environment == "browsergym"
                ):  # an episode's own: they go with it, while the runner waits for a server
                    wait_for_end(theirs, PATIENCE_S)
                    assert runner.poll() is None
                runner.send_signal(signal.SIGTERM)
            else:
                runner.kill()
            wait_for_end(family, PATIENCE_S)
            runner.wait(PATIENCE_S)
        finally:
            runner.kill()

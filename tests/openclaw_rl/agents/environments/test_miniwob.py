"""MiniWoB in real Chromium, on pages of the test with MiniWoB's own names, and what a killed part leaves behind."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse
from playwright.async_api import Error
from processes_below import below, browsers, kill, program, wait_for_end

from openclaw_rl.agents.environment import Outcome, Task, load, whole_tasks
from openclaw_rl.agents.environments.browser import _PROGRAMS
from openclaw_rl.agents.environments.miniwob import Action, MiniWob, action_of
from openclaw_rl.agents.sandbox import Sandboxes
from openclaw_rl.errors import EnvironmentFault, SettingsError

Play = Callable[..., Any]
CORE = """
var WOB_DONE_GLOBAL = false, WOB_RAW_REWARD_GLOBAL = 0;
Math.seedrandom = (seed) => { Math.random = () => ((seed * 9301 + 49297) % 233280) / 233280; };
var core = {
  startEpisodeReal: () => { WOB_DONE_GLOBAL = false; genProblem(); },
  endEpisode: (reward) => { WOB_DONE_GLOBAL = true; WOB_RAW_REWARD_GLOBAL = reward; },
};
"""
PAGE = """<!doctype html><script src="../core/core.js"></script>
<div id="query"></div><div id="reward-display">Reward: 0</div>
<div id="area"><input aria-label="Name" id="name"><select aria-label="Size"><option>small</option><option>large</option>
</select><button id="go">Go</button> <a href="#x">More</a>
<p>Read <span id="word">on</span> and <span id="star" class="star" style="padding: 4px"></span> and
plain <span>text</span>.</p></div>
<script>
for (const id of ["word", "star"]) document.getElementById(id).addEventListener("click", () => core.endEpisode(0.5));
function genProblem() {
  window.word = Math.random() < 0.5 ? "ann" : "bob";
  document.getElementById("query").innerText = `Enter ${word}, choose large and press Go.`;
}
document.getElementById("go").onclick = () => {
  const right = document.getElementById("name").value === word && document.querySelector("select").value === "large";
  core.endEpisode(right ? 1 : -1);
};
</script>"""
LEAK = """<!doctype html><script src="../core/core.js"></script><div id="query"></div><div id="area">
<p id="said">waiting</p></div>
<script>
function genProblem() { document.getElementById("query").innerText = "Leak."; }
const tried = (name, work) => Promise.resolve().then(work).then(() => name + " open", () => name + " closed");
const image = (url) => new Promise((ok, no) => { const i = new Image(); i.onload = ok; i.onerror = no; i.src = url; });
const socket = (url) => new Promise((ok, no) => { const s = new WebSocket(url); s.onopen = ok; s.onerror = no; });
const frame = (url) => new Promise((ok, no) => {
  const f = document.createElement("iframe"); f.src = url; document.body.append(f);
  setTimeout(() => { try { f.contentDocument.body.innerText ? ok() : no(); } catch { no(); } }, 1000);
});
Promise.all([
  tried("fetch", () => fetch("http://127.0.0.1:PORT/fetch", { mode: "no-cors" })),
  tried("image", () => image("http://127.0.0.1:PORT/image")),
  tried("socket", () => socket("ws://127.0.0.1:PORT/socket")),
  tried("passwd", () => frame("file:///etc/passwd")),
  tried("home", () => frame("file://HOME/")),
]).then((all) => { document.getElementById("said").innerText = all.join(", "); });
</script>"""
CHROMIUM = any(map(shutil.which, _PROGRAMS))


@pytest.fixture(scope="module", autouse=True)
def chromium() -> None:
    assert CHROMIUM, "these tests need Chromium: apt-get install chromium"


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    folder = tmp_path / "html"
    for name, text in (("core/core.js", CORE), ("miniwob/form.html", PAGE)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
async def environment(pages: Path) -> AsyncIterator[MiniWob]:
    # Patience with a busy machine; a wrong action then waits as long.
    made = MiniWob(pages=("form",), train_tasks=40, eval_tasks=4, folder=str(pages), action_s=60)
    yield made
    await made.close()


def ref(shown: str, words: str) -> str:
    """Return the reference of the element with this name."""
    line = next(line for line in shown.splitlines() if f'"{words}"' in line)
    return line.partition("[ref=")[2].partition("]")[0]


def right(messages: list[dict[str, Any]]) -> str:
    """Play the form as it should be, one action a step."""
    first, shown = str(messages[1]["content"]), str(messages[-1]["content"])
    word = first.partition("Enter ")[2].partition(",")[0]
    match sum(one["role"] == "assistant" for one in messages):
        case 0:
            return f"I type.\n\n`type('{ref(shown, 'Name')}', '{word}')`"
        case 1:
            return f"select('{ref(shown, 'Size')}', 'large')"
        case _:
            return f"click('{ref(shown, 'Go')}')"


async def test_the_page_judges(environment: MiniWob, play: Play) -> None:
    task = whole_tasks(environment, "train")[0]
    found = await play(environment, task, right)
    assert found == Outcome(1.0, {"steps": 3, "raw_reward": 1})
    found = await play(environment, task, lambda messages: f"click('{ref(messages[-1]['content'], 'Go')}')")
    assert found == Outcome(-1.0, {"steps": 1, "raw_reward": -1})
    # Elements that only hear clicks have names, and half a reward is none.
    for name in ("on", "star"):
        found = await play(
            environment, task, lambda messages, name=name: f"click('{ref(messages[-1]['content'], name)}')"
        )
        assert found == Outcome(-1.0, {"steps": 1, "raw_reward": 0.5})
    assert environment._browser._chromium is not None
    with pytest.raises(EnvironmentFault, match="refused a chat"):  # as a server that was killed
        await play(environment, task, lambda _: JSONResponse({"error": {"message": "gone"}}, 400))
    assert environment._browser._chromium.contexts == []


async def test_wrong_actions_get_words(pages: Path, play: Play) -> None:
    environment = MiniWob(pages=("form",), folder=str(pages), action_s=1)
    task = whole_tasks(environment, "train")[0]
    seen: list[str] = []
    wrong = iter(
        ("Hm.", "click('e99999')", "drag('e1', 'e2')", "wait()", "click('e1 >> ../#reward-display')", "wait()")
    )

    def say(messages: list[dict[str, Any]]) -> str:
        seen.append(str(messages[-1]["content"]))
        return next(wrong)

    found = await play(environment, task, say, steps=6)
    assert found.reward == -1.0
    assert [text.partition("\n")[0] for text in seen[1:]] == [
        "Error: the last line is no action.",
        seen[2].partition("\n")[0],
        "Error: the last line is no action.",
        seen[4].partition("\n")[0],
        "Error: the first argument is no element of the page.",
    ]
    assert seen[2].startswith("Error: ")
    assert seen[4].startswith("Task: ")
    assert "Reward: 0" not in seen[0]
    await environment.close()


def test_a_seed_makes_a_task_of_its_own_and_the_splits_are_disjoint(environment: MiniWob) -> None:
    train, held_out = ([task.id for task in whole_tasks(environment, split)] for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (40, 4)
    assert not set(train) & set(held_out)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("click('e7')", Action("click", ("e7",))),
        ('I think.\n\n`type("e2", "it\'s 5")`\n', Action("type", ("e2", "it's 5"))),
        ("wait()", Action("wait", ())),
        ("click(7)", Action("click", ("7",))),
        ("click('e7').x", None),
        ("click(open('/etc/passwd'))", None),
        ("click('e7', 'e8')", None),
        ("click(element='e7')", None),
        ("(" * 1000, None),
        ("", None),
    ],
)
def test_an_action_is_parsed_and_never_evaluated(reply: str, action: Action | None) -> None:
    assert action_of(reply) == action


async def test_sixteen_contexts_at_once_share_one_browser(environment: MiniWob, play: Play) -> None:
    tasks = whole_tasks(environment, "train")[:16]
    found = await asyncio.gather(*(play(environment, task, right) for task in tasks))
    assert [outcome.reward for outcome in found] == [1.0] * 16


@pytest.fixture
def listening() -> Iterator[tuple[int, list[str]]]:
    """A server of this machine, and the paths that were asked of it."""
    asked: list[str] = []

    class Noting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Noting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, asked
    server.shutdown()
    server.server_close()


async def test_a_page_reaches_no_network_and_no_file_of_the_host(
    pages: Path, play: Play, listening: tuple[int, list[str]]
) -> None:
    port, asked = listening
    (pages / "miniwob" / "leak.html").write_text(LEAK.replace("PORT", str(port)).replace("HOME", str(Path.home())))
    environment = MiniWob(pages=("leak",), folder=str(pages))
    seen: list[str] = []

    def say(messages: list[dict[str, Any]]) -> str:
        seen.append(str(messages[-1]["content"]))
        return "wait()"

    try:
        for steps in (4, 60):  # each waits a second: a busy machine gets more of them
            await play(environment, Task("leak", data={"page": "leak", "seed": 1}), say, steps=steps)
            if "waiting" not in seen[-1]:
                break
    finally:
        await environment.close()
    assert "fetch closed, image closed, socket closed, passwd closed, home closed" in seen[-1]
    assert asked == []


async def test_a_browser_that_reads_anything_and_is_online_finds_no_host(
    environment: MiniWob, sandboxes: Sandboxes, tmp_path: Path, listening: tuple[int, list[str]]
) -> None:
    # A page may read no file and is offline: this asks what is left when Chromium's own rules are not in the way.
    port, asked = listening
    (tmp_path / "secret").write_text("of the host")
    found: list[str] = []
    async with environment._browser.page(sandboxes) as page:
        await page.context.set_offline(False)
        for url in (
            "file:///pages/miniwob/form.html",
            "file:///etc/passwd",
            (tmp_path / "secret").as_uri(),
            f"http://127.0.0.1:{port}/",
        ):
            tab = await page.context.new_page()
            try:
                await tab.goto(url)
                found.append("open")
            except Error as error:
                found.append(error.message.partition(" at ")[0].rpartition(" ")[2])
    gone = "net::ERR_FILE_NOT_FOUND"
    assert found == ["open", gone, gone, "net::ERR_CONNECTION_REFUSED"]
    assert asked == []


async def test_a_browser_that_died_is_a_fault_and_the_next_episode_has_a_new_one(
    environment: MiniWob, play: Play, sandboxes: Sandboxes
) -> None:
    task = whole_tasks(environment, "train")[0]

    def kill_and_answer(messages: list[dict[str, Any]]) -> str:
        killed = browsers(below(os.getpid()))
        assert killed
        kill(killed)
        return right(messages)

    with pytest.raises(EnvironmentFault, match="the browser failed"):
        await play(environment, task, kill_and_answer)
    assert (await play(environment, task, right)).reward == 1.0


def test_a_page_that_is_not_there_is_an_error(pages: Path) -> None:
    with pytest.raises(SettingsError, match=r"there is no .*/miniwob/none\.html"):
        load("miniwob", {"folder": str(pages), "pages": ["none"]})


async def test_without_chromium_the_words_say_what_to_install(pages: Path, play: Play) -> None:
    environment = MiniWob(pages=("form",), folder=str(pages), program="no-such-chromium")
    with pytest.raises(EnvironmentFault, match="needs Chromium: apt-get install chromium"):
        await play(environment, whole_tasks(environment, "train")[0], right)
    await environment.close()


async def test_a_browser_that_does_not_start_says_why(pages: Path, tmp_path: Path, play: Play) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\necho no display >&2\nexit 1\n")
    program.chmod(0o755)
    environment = MiniWob(pages=("form",), folder=str(pages), program=str(program))
    with pytest.raises(EnvironmentFault, match=r"the browser failed: BrowserType\.launch: .*: (no display|bwrap: )"):
        await play(environment, whole_tasks(environment, "train")[0], right)
    await environment.close()


HOLDER = """
import asyncio, sys
from openclaw_rl.agents.environments.miniwob import MiniWob
from openclaw_rl.agents.sandbox import Limits, Sandboxes
async def main():
    environment = MiniWob(pages=("form",), folder=sys.argv[1])
    async with environment._browser.page(await Sandboxes.choose("bubblewrap", Limits())) as page:
        await page.goto("file:///pages/miniwob/form.html")
        print("ready", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["runner", "driver", "bubblewrap", "browser"])
def test_no_browser_is_left_when_a_part_is_killed(victim: str, pages: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(pages)], stdout=subprocess.PIPE, text=True) as runner:
        try:
            assert runner.stdout is not None
            assert runner.stdout.readline() == "ready\n"
            family = below(runner.pid)
            programs = {process: program(process) for process in family}
            theirs = [process for process, name in programs.items() if name == "bwrap" or "chrom" in name]
            assert theirs
            name = {"driver": "node", "bubblewrap": "bwrap"}.get(victim)
            chosen = [process for process in family if programs[process] == name]
            if victim == "browser":  # `chromium`, `chrome`: which one, the machine decides
                chosen = [process for process in theirs if "chrom" in programs[process]]
            pid = next((process.pid for process in chosen), runner.pid)
            assert (pid == runner.pid) == (victim == "runner"), programs
            os.kill(pid, signal.SIGKILL)
            wait_for_end(family if victim == "runner" else theirs, 60)
        finally:
            runner.kill()

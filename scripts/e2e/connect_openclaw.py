"""Check `openclaw-rl connect openclaw` with the real OpenClaw: connect, chat, look at the page, undo.

    scripts/e2e.sh connect_openclaw FOLDER

FOLDER keeps the installed client between runs; it needs npm, Playwright and Chromium. The first machine has no
configuration; its user adds a Telegram bot after the connection. The second has a full JSON5 file with comments, a
hosted model and a Telegram bot, and its gateway runs before the connection is made. On a third, the user's own provider
has our name and address, and stays. On the first two, a user chats through the WebChat's methods and through a fake
Telegram: a thumb for the first reply, a correction of the second. The script prints each check on a line. A dry run
writes nothing; the client keeps the user's values; one message of `--check` arrives in its session; the ledger and the
page in headless Chromium show the chat, the thumb, the correction and the wish; `--undo` leaves every byte as it was.
The page's screenshots stay in FOLDER.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Browser, Page

from benchmarks.browser import chromium, go, opened
from e2e.fake_telegram import FakeTelegram
from e2e.local_app import served
from e2e.openclaw_client import Gateway, environ, free_port, install
from e2e.openclaw_surfaces import PRAISE, Surface, Telegram, WebChat, telegram_config
from openclaw_rl.testing.running_server import RunningServer

TOKEN = "a-token-of-the-user"
FULL = """\
// My OpenClaw. The comments are mine.
{
  logging: { file: "%(home)s/openclaw.log" },   // trailing commas, too
  models: {
    providers: {
      hosted: {
        baseUrl: "http://127.0.0.1:9/v1", apiKey: "sk-not-a-key", api: "openai-completions",
        models: [{ id: "large", name: "Large", contextWindow: 200000, maxTokens: 8192 }],
      },
    },
  },
  agents: {
    defaults: {
      model: { primary: "hosted/large", fallbacks: [] },
      workspace: '%(home)s/workspace',
      heartbeat: { every: "0m" },
      /* a small prompt: the model of this test has a context of 8,192 tokens */
      skipBootstrap: true, contextInjection: "never", skills: [],
    },
  },
  tools: { deny: ["*"] },
  channels: { telegram: %(telegram)s },
  gateway: { mode: "local", port: %(port)d, bind: "loopback", auth: { mode: "token", token: "%(token)s" } },
}
"""
OWN = """\
{
  // The user wrote this provider by hand: its name and its address are ours.
  models: { providers: { rl: {
    baseUrl: "%(url)s/v1", apiKey: 'a-key-of-the-user', headers: { "X-Mine": "yes" },
    models: [{ id: "policy", name: "Mine", contextWindow: 8192, maxTokens: 64, }],
  } } },
  agents: { defaults: { skipBootstrap: true, contextInjection: "never", skills: [], }, }, // 1,800 tokens of prompt
  tools: { deny: ["*"] },
  gateway: { mode: "local" },
}
"""
SAID = ("Name a tree.", "And a river?", "No, that is too long. Please answer in one word.")
"""The user's messages: a question, another one after a thumb, a correction."""
JUDGED_S = 60.0
Checks = dict[str, bool]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    folder = options.folder.absolute()
    binaries = install(folder)
    work = folder / f"connect-{int(time.time())}"
    # OPD makes a wish of a correction. Nothing is practised or trained meanwhile.
    args = ["--method", "opd", "--batch-size", "64"]
    args += ["--set", "practice.idle_s=3600", "--set", "sampling.max_new_tokens=64"]
    telegram = FakeTelegram()
    with RunningServer(work / "data", args) as server, served(telegram.app()) as api_root, chromium() as browser:
        eye = Eye(server, browser, work)
        found = without_configuration(eye, telegram, api_root, binaries, work / "new")
        found |= with_a_full_one(eye, telegram, api_root, binaries, work / "full")
        found |= with_a_provider_of_our_name(server, binaries, work / "own")
    for what, holds in found.items():
        print(f"{'ok  ' if holds else 'FAIL'} {what}")
    return 0 if all(found.values()) else 1


def without_configuration(eye: "Eye", telegram: FakeTelegram, api_root: str, binaries: Path, home: Path) -> Checks:
    home.mkdir(parents=True)
    server, client, port = eye.server, environ(binaries, home), free_port()
    file = home / ".openclaw" / "openclaw.json"
    shown = connect(server, client, "--dry-run")
    found = {"new: a dry run writes nothing": not file.exists() and "Nothing is written" in shown}
    connect(server, client, "--yes")
    written = json.loads(file.read_text())
    found |= {
        "new: the provider has the served model's context": model_of(written)["contextWindow"] == 8192,
        "new: its merge keeps other providers": written["models"]["mode"] == "merge",
        "new: --check without a gateway finds its message in the ledger": in_ledger(
            server, connect(server, client, "--check")
        ),
    }
    # The user's gateway: its port and token are not in the file.
    client |= {"OPENCLAW_GATEWAY_PORT": str(port), "OPENCLAW_GATEWAY_TOKEN": TOKEN}
    with Gateway(client, port=port, token=TOKEN, out=home / "gateway.out"):
        found["new: --check through the gateway does, too"] = in_ledger(server, connect(server, client, "--check"))
        found |= eye.chat("new", WebChat(client))
    connect(server, client, "--undo", "--yes")
    found["new: --undo leaves no configuration"] = not file.exists()
    connect(server, client, "--yes")
    patch(client, {"channels": {"telegram": telegram_config(api_root)}})
    with Gateway(client, port=port, token=TOKEN, out=home / "gateway.out"):
        found |= eye.chat("new", Telegram(telegram))
    connect(server, client, "--undo", "--yes")
    left = json.loads(file.read_text())
    found["new: a bot that was added since stays, and our values go"] = left["channels"]["telegram"][
        "botToken"
    ] == "42:FAKE" and "rl" not in json.dumps(left.get("models", {}))
    return found


def with_a_full_one(eye: "Eye", telegram: FakeTelegram, api_root: str, binaries: Path, home: Path) -> Checks:
    (home / ".openclaw").mkdir(parents=True)
    server, client, port = eye.server, environ(binaries, home), free_port()
    file = home / ".openclaw" / "openclaw.json"
    channel = json.dumps(telegram_config(api_root))
    file.write_text(FULL % {"home": home, "port": port, "token": TOKEN, "telegram": channel})
    before = file.read_bytes()
    is_valid = validates(client)
    with Gateway(client, port=port, token=TOKEN, out=home / "gateway.out"):
        shown = connect(server, client, "--dry-run")
        found = {
            "full: the client took the file before": is_valid,
            "full: a dry run writes nothing": file.read_bytes() == before and '(was "hosted/large")' in shown,
            "full: no key is shown": "sk-not-a-key" not in shown,
        }
        connect(server, client, "--yes")
        written = json.loads(file.read_text())
        found["full: the user's values stay"] = (
            written["models"]["providers"]["hosted"]["apiKey"] == "sk-not-a-key"
            and written["channels"]["telegram"]["botToken"] == "42:FAKE"
            and written["agents"]["defaults"]["model"] == {"primary": "rl/policy", "fallbacks": []}
        )
        found["full: --check finds its message in the ledger"] = in_ledger(server, connect(server, client, "--check"))
        found |= eye.chat("full", WebChat(client)) | eye.chat("full", Telegram(telegram))
        undone = connect(server, client, "--undo", "--yes")
        is_same = file.read_bytes() == before
    return found | {
        "full: --undo leaves every byte as it was, beside a gateway that runs": is_same and "byte for byte" in undone,
        "full: and it stays so when the gateway has ended": file.read_bytes() == before and validates(client),
    }


def with_a_provider_of_our_name(server: RunningServer, binaries: Path, home: Path) -> Checks:
    (home / ".openclaw").mkdir(parents=True)
    client, file = environ(binaries, home), home / ".openclaw" / "openclaw.json"
    file.write_text(OWN % {"url": server.url})
    before = file.read_bytes()
    shown = connect(server, client, "--yes")
    written = json.loads(file.read_text())
    provider = written["models"]["providers"]["rl"]
    found = {
        "own: a provider of the user's by our name stays as it is": provider["apiKey"] == "a-key-of-the-user"
        and provider["headers"] == {"X-Mine": "yes"}
        and "rl is yours and stays" in shown,
        "own: and serves the default model": in_ledger(server, connect(server, client, "--check")),
    }
    connect(server, client, "--undo", "--yes")
    found["own: --undo leaves every byte as it was"] = file.read_bytes() == before
    connect(server, client, "--yes")
    patch(client, {"logging": {"file": f"{home}/openclaw.log"}})
    connect(server, client, "--undo", "--yes")
    left = json.loads(file.read_text())
    stays = left["models"]["providers"]["rl"] == provider
    found["own: after a change of the file it stays, too"] = stays and "rl/policy" not in json.dumps(left["agents"])
    return found


@dataclass(frozen=True, slots=True)
class Eye:
    """Looks at a chat through the server's API and its page."""

    server: RunningServer
    browser: Browser
    shots: Path

    def chat(self, machine: str, surface: Surface) -> Checks:
        """Chat, praise and correct through the surface; return the checks of what is shown of it."""
        known = {turn["turn"]["turn_id"] for turn in self.server.turns()}
        for number, text in enumerate(SAID):
            print(f"{surface.name}: {text!r} → {surface.say(text)!r}", flush=True)
            if number == 0:
                surface.praise()
        turns = self._judged(known)
        found = self._in_ledger(surface, turns) | self._on_page(machine, surface, turns)
        return {f"{machine}, {surface.name}: {what}": holds for what, holds in found.items()}

    def _judged(self, known: Collection[str]) -> list[Any]:
        """Return the turns beside the known ones, once both first ones are judged or the time is over."""
        end = time.monotonic() + JUDGED_S
        while True:
            turns = [turn for turn in self.server.turns() if turn["turn"]["turn_id"] not in known]
            if sum(turn["verdict"] is not None for turn in turns) >= 2 or time.monotonic() > end:
                return turns
            time.sleep(1)

    def _in_ledger(self, surface: Surface, turns: list[Any]) -> Checks:
        if len(turns) != len(SAID):
            return {f"{len(SAID)} messages are {len(turns)} turns": False}
        first, second, _ = turns
        end = time.monotonic() + JUDGED_S
        while second["turn"]["turn_id"] not in (sources := self._sources()) and time.monotonic() < end:
            time.sleep(1)  # the teacher scores a turn behind its verdict
        is_told = (
            first["next_state"]["reactions"] == ["👍"]
            if isinstance(surface, Telegram)
            else [one["value"] for one in first["feedback"]] == [1.0]
        )
        return {
            "each message is a turn of one session": len({t["request"]["scope"]["session_id"] for t in turns}) == 1
            and all(text in str(turn["request"]["messages"][-2:]) for text, turn in zip(SAID, turns, strict=True)),
            "each turn is paired with the next message": all(
                text in str(turn["next_state"]) for text, turn in zip(SAID[1:], turns, strict=False)
            ),
            "no prompt holds the command": PRAISE not in str(turns),
            "the thumb is the verdict on the first reply": is_told and verdict(first) == 1,
            "the correction is the verdict on the second": verdict(second) == -1,
            "and its wish names that turn": second["turn"]["turn_id"] in sources,
        }

    def _sources(self) -> set[str]:
        """Return the turns that ask for a wish."""
        wishes = self.server.admin("GET", "/v1/wishes")["wishes"]
        return {source["turn_id"] for wish in wishes for source in wish["sources"]}

    def _on_page(self, machine: str, surface: Surface, turns: list[Any]) -> Checks:
        if len(turns) != len(SAID):
            return {}
        session = turns[0]["request"]["scope"]["session_id"]
        page = opened(self.browser, self.server)
        go(page, f"#/turns?session_id={quote(session)}")
        page.get_by_text(f"{len(SAID)} in all").wait_for()
        rows = [row.inner_text() for row in page.locator(".item").all()]
        marks = [row.split()[0] for row in reversed(rows)]
        told = [self._one(page, turn, f"{machine}-{surface.name}-{n}") for n, turn in enumerate(turns[:2], 1)]
        go(page, "#/wishes")
        page.locator(".card").first.wait_for()
        wishes = page.locator("main").inner_text()
        page.context.close()
        thumb = "Reactions: 👍" if isinstance(surface, Telegram) else "feedback"
        return {
            "the page lists the three turns": all(text in row for text, row in zip(SAID, reversed(rows), strict=True)),
            "with their verdicts": marks == ["+", "−", "·"],
            "it shows the thumb": thumb in told[0] and "good by" in told[0],
            "it shows the correction as the next state, and bad": SAID[2] in told[1] and "bad by" in told[1],
            "it shows the wish": "one word" in wishes,
        }

    def _one(self, page: Page, turn: Any, name: str) -> str:
        """Return the text of a turn in full."""
        go(page, f"#/turns/{quote(turn['turn']['turn_id'])}")
        page.get_by_role("heading", name="Its way").wait_for()
        page.screenshot(path=str(self.shots / f"{name}.png"), full_page=True)
        return page.locator("main").inner_text()


def verdict(turn: Any) -> int | None:
    return None if turn["verdict"] is None else int(turn["verdict"]["value"])


def validates(client: Mapping[str, str]) -> bool:
    argv = ["openclaw", "config", "validate"]
    return subprocess.run(argv, env=client, check=False, stdout=subprocess.DEVNULL).returncode == 0


def patch(client: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Change the configuration as its user does."""
    argv = ["openclaw", "config", "patch", "--stdin"]
    subprocess.run(argv, env=client, check=True, input=json.dumps(values), text=True, stdout=subprocess.DEVNULL)


def connect(server: RunningServer, client: Mapping[str, str], *flags: str) -> str:
    """Run the command as a user does; return its output. Raises CalledProcessError."""
    argv = [sys.executable, "-m", "openclaw_rl", "connect", "openclaw", *flags, "--data-dir", str(server.data_dir)]
    started = time.monotonic()
    done = subprocess.run(argv, env={**client, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True, check=False)
    print(f"$ openclaw-rl connect openclaw {' '.join(flags)}    # {time.monotonic() - started:.1f} s")
    print(done.stdout + done.stderr, flush=True)
    done.check_returncode()
    return done.stdout


def model_of(written: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = written["models"]["providers"]["rl"]["models"][0]
    return found


def in_ledger(server: RunningServer, checked: str) -> bool:
    """Return True if the turn that `--check` named is in the ledger, in the session that it named."""
    named = re.search(r"ledger: (\S+), session (\S+), version 0", checked)
    if named is None:
        return False
    turn = server.admin("GET", f"/v1/turns/{named[1]}")
    return bool(turn["request"]["scope"]["session_id"] == named[2])


if __name__ == "__main__":
    sys.exit(main())

"""Check `openclaw-rl connect openclaw` with the real OpenClaw: connect, check, undo, on two machines' configurations.

    scripts/e2e.sh connect_openclaw FOLDER

FOLDER keeps the installed client between runs; it needs npm. The first machine has no configuration, and its client
has no gateway. The second has a full JSON5 file with comments, a hosted model and a Telegram bot, and its gateway runs
before the connection is made. The script prints each check on a line: a dry run writes nothing, the client accepts and
keeps the user's values, one message arrives in the ledger with its session, a correction is paired in the chat, and
`--undo` leaves every byte as it was.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e.openclaw_client import Gateway, environ, free_port, install
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
  channels: { telegram: { enabled: false, botToken: "42:FAKE", dmPolicy: "allowlist", allowFrom: ["777"] } },
  gateway: { mode: "local", port: %(port)d, bind: "loopback", auth: { mode: "token", token: "%(token)s" } },
}
"""
SAID = ("Name a tree.", "No, that is wrong. Name a river.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    folder = options.folder.absolute()
    binaries = install(folder)
    work = folder / f"connect-{int(time.time())}"
    args = ["--set", "training.enabled=false", "--set", "sampling.max_new_tokens=24"]
    with RunningServer(work / "data", args) as server:
        found = without_configuration(server, binaries, work / "new")
        found |= with_a_full_one(server, binaries, work / "full")
    for what, holds in found.items():
        print(f"{'ok  ' if holds else 'FAIL'} {what}")
    return 0 if all(found.values()) else 1


def without_configuration(server: RunningServer, binaries: Path, home: Path) -> dict[str, bool]:
    home.mkdir(parents=True)
    client = environ(binaries, home)
    file = home / ".openclaw" / "openclaw.json"
    shown = connect(server, client, "--dry-run")
    is_untouched = not file.exists()
    connect(server, client, "--yes")
    written = json.loads(file.read_text())
    checked = connect(server, client, "--check")
    connect(server, client, "--undo", "--yes")
    return {
        "new: a dry run writes nothing": is_untouched and "Nothing is written" in shown,
        "new: the provider has the served model's context": model_of(written)["contextWindow"] == 8192,
        "new: its merge keeps other providers": written["models"]["mode"] == "merge",
        "new: one message is in the ledger with its session": in_ledger(server, checked),
        "new: --undo leaves no configuration": not file.exists(),
    }


def with_a_full_one(server: RunningServer, binaries: Path, home: Path) -> dict[str, bool]:
    (home / ".openclaw").mkdir(parents=True)
    client = environ(binaries, home)
    file, port = home / ".openclaw" / "openclaw.json", free_port()
    file.write_text(FULL % {"home": home, "port": port, "token": TOKEN})
    subprocess.run(["openclaw", "config", "validate"], env=client, check=True, stdout=subprocess.DEVNULL)
    with Gateway(client, port=port, token=TOKEN, out=home / "gateway.out"):
        before = file.read_bytes()
        shown = connect(server, client, "--dry-run")
        is_untouched = file.read_bytes() == before
        connect(server, client, "--yes")
        written = json.loads(file.read_text())
        checked = connect(server, client, "--check")
        for text in SAID:
            say(client, text)
        turns = server.turns()
    undone = connect(server, client, "--undo", "--yes")
    chat = [turn for turn in turns if any(text in str(turn["request"]["messages"]) for text in SAID)]
    corrected = chat[0].get("next_state") if chat else None
    return {
        "full: a dry run writes nothing": is_untouched and '(was "hosted/large")' in shown,
        "full: no key is shown": "sk-not-a-key" not in shown,
        "full: the user's values stay": written["models"]["providers"]["hosted"]["apiKey"] == "sk-not-a-key"
        and written["channels"]["telegram"]["botToken"] == "42:FAKE"
        and written["agents"]["defaults"]["model"] == {"primary": "rl/policy", "fallbacks": []},
        "full: one message through the gateway is in the ledger with its session": in_ledger(server, checked),
        "full: a chat's correction is paired": len(chat) == 2 and SAID[1] in str(corrected),
        "full: --undo leaves every byte as it was": file.read_bytes() == before and "byte for byte" in undone,
        "full: the file is valid for the client": subprocess.run(
            ["openclaw", "config", "validate"], env=client, check=False, stdout=subprocess.DEVNULL
        ).returncode
        == 0,
    }


def connect(server: RunningServer, client: Mapping[str, str], *flags: str) -> str:
    """Run the command as a user does; return its output. Raises CalledProcessError."""
    argv = [sys.executable, "-m", "openclaw_rl", "connect", "openclaw", *flags, "--data-dir", str(server.data_dir)]
    started = time.monotonic()
    done = subprocess.run(argv, env={**client, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True, check=False)
    print(f"$ openclaw-rl connect openclaw {' '.join(flags)}    # {time.monotonic() - started:.1f} s")
    print(done.stdout + done.stderr, flush=True)
    done.check_returncode()
    return done.stdout


def say(client: Mapping[str, str], message: str) -> None:
    argv = ["openclaw", "agent", "--session-key", "chat", "--message", message, "--timeout", "600"]
    done = subprocess.run(argv, env=client, check=True, capture_output=True, text=True, timeout=720)
    print(f"user:  {message}\nagent: {done.stdout.strip()!r}", flush=True)


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

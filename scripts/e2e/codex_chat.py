"""Check the real Codex CLI on the Responses API: a tool loop of three turns, a command, thanks. The engine is a stub.

    scripts/e2e.sh codex_chat FOLDER [--report FILE]

FOLDER keeps the installed client between runs; it needs npm. The model is the bundled one's tokenizer with a template
that shows tools and with a context of 65,536 tokens: Codex's own prompt has 6,500. The stub says what the script tells
it. The script prints each check on a line: Codex ran the commands that the model asked for, each reply is one
recorded turn of Codex's thread, each turn is paired with the command's output or the user's next message, and
`/rl bad` rated the answer before it and was neither a turn nor a next state.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from e2e.local_app import served
from openclaw_rl.testing import FakeEngine, Scripted, stub_app
from openclaw_rl.testing.running_server import RunningServer, engine_flags

CODEX = "@openai/codex@0.171.0"
CONTEXT, TURN_S = 65_536, 180
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
FIRST, COMMAND, THANKS = "Print two words.", "/rl bad too long", "Thanks, that is perfect!"
WORDS = ("harbour", "glacier")


def call(word: str) -> str:
    arguments = json.dumps({"cmd": f"echo {word}"})
    return f'<tool_call>\n{{"name": "exec_command", "arguments": {arguments}}}\n</tool_call>'


REPLIES = (
    f"<think>\nThe first word.\n</think>\n\nI print them.\n{call(WORDS[0])}",
    f"<think>\nThe second word.\n</think>\n\n{call(WORDS[1])}",
    "<think>\nDone.\n</think>\n\nBoth words are printed, each by a command of its own.",
    "You are welcome.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--report", type=Path, help="JSON file for the records of the chat")
    options = parser.parse_args()
    folder = options.folder.absolute()
    binary = install(folder)
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    fake = FakeEngine(context_length=CONTEXT)
    with (
        served(stub_app(fake)) as engine,
        RunningServer(folder / f"data-{int(time.time())}", settings(engine, template)) as server,
    ):
        script(fake, server.data_dir)
        client = Codex(binary, folder / "codex", server.data_dir)
        said = [client.say(text) for text in (FIRST, COMMAND, THANKS)]
        turns, counts = server.turns(), server.status()["counts"]
    if options.report:
        options.report.write_text(json.dumps({"events": said, "turns": turns}, indent=1, ensure_ascii=False))
    return told(checks(said, turns, counts))


def install(folder: Path) -> Path:
    """Install the client into folder/inst once; return its executable."""
    inst = folder / "inst"
    binary = inst / "node_modules" / ".bin" / "codex"
    if not binary.exists():
        inst.mkdir(parents=True, exist_ok=True)
        (inst / "package.json").write_text('{"private": true}')
        subprocess.run(["npm", "i", "--no-fund", "--no-audit", "--loglevel=error", CODEX], cwd=inst, check=True)
    return binary


def settings(engine: str, template: Path) -> list[str]:
    chosen = {
        "judge.kind": "rules",
        "model.context_length": str(CONTEXT),
        "model.chat_template": str(template),
        "model.tool_call_parser": "qwen25",
        "model.reasoning_parser": "qwen3",
    }
    return engine_flags(engine, chosen)


def script(fake: FakeEngine, data_dir: Path) -> None:
    """Let the engine give the replies of the chat, in the tokens of the bundled model."""
    tokenizer = Tokenizer.from_file(str(next((data_dir / "cache").rglob("tokenizer.json"))))
    for text in REPLIES:
        fake.script(Scripted(ids=tuple(tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids)))


class Codex:
    """The client with a home of its own, connected by `openclaw-rl connect codex`; it asks nobody."""

    def __init__(self, binary: Path, folder: Path, data_dir: Path) -> None:
        home, self._work = folder / "home", folder / "work"
        for path in (home / ".codex", self._work):
            path.mkdir(parents=True, exist_ok=True)
        lines = (
            'approval_policy = "never"',
            'sandbox_mode = "danger-full-access"',  # the stub asks for `echo` alone
            "[analytics]",
            "enabled = false",
        )
        (home / ".codex" / "config.toml").write_text("\n".join(lines))
        argv = [sys.executable, "-m", "openclaw_rl", "connect", "codex", "--write", "--data-dir", str(data_dir)]
        subprocess.run(argv, env=os.environ | {"CODEX_HOME": str(home / ".codex")}, check=True)
        self._binary, self._environ = binary, os.environ | {"HOME": str(home), "CODEX_HOME": str(home / ".codex")}
        self._thread: str | None = None

    def say(self, text: str) -> list[Any]:
        """Send one user message; return the client's events. Raises CalledProcessError if the client fails."""
        argv = [str(self._binary), "exec", "--profile", "rl", "--json", "--skip-git-repo-check"]
        argv += [text] if self._thread is None else ["resume", self._thread, text]
        done = subprocess.run(
            argv,
            cwd=self._work,
            env=self._environ,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_S,
        )
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        self._thread = self._thread or next(e["thread_id"] for e in events if e["type"] == "thread.started")
        print(f"user:  {text}\nagent: {last_words(events)!r}", flush=True)
        return events


def last_words(events: list[Any]) -> str:
    """Return the text of the client's last message of the agent."""
    texts = [
        e["item"]["text"] for e in events if e.get("item", {}).get("type") == "agent_message" and "text" in e["item"]
    ]
    return str(texts[-1]) if texts else ""


def checks(said: list[list[Any]], turns: list[Any], counts: dict[str, int]) -> dict[str, bool]:
    """Return the checks of what the client showed and what the ledger holds."""
    items = [e["item"] for e in said[0] if e["type"] == "item.completed"]
    outputs = [item["aggregated_output"].strip() for item in items if item["type"] == "command_execution"]
    states = [turn["next_state"] for turn in turns]
    roles = [[message["role"] for message in state["messages"]] if state else None for state in states]
    contents = [turn["turn"]["reply"].get("content") or "" for turn in turns]
    thread = next(e["thread_id"] for e in said[0] if e["type"] == "thread.started")
    answer = turns[2] if len(turns) > 2 else {"feedback": [], "verdict": None}
    whole = json.dumps(turns, ensure_ascii=False)
    return {
        "the client ran the commands of the model": outputs == list(WORDS),
        "it shows the model's answer": last_words(said[0]) == contents[2] if len(contents) > 2 else False,
        "each reply is one turn": len(turns) == len(REPLIES),
        "of the client's own thread": {turn["request"]["scope"]["session_id"] for turn in turns} == {thread},
        "each is paired with the command's output or the user's next message": roles
        == [["tool"], ["tool"], ["user"], None],
        "the outputs are whole": all(
            word in states[n]["messages"][0]["content"] for n, word in enumerate(WORDS) if len(states) > n and states[n]
        ),
        "the thoughts are recorded beside the text": "The first word." in str(turns[0]["turn"]["reply"]),
        "/rl bad was answered by the server": "rated bad" in last_words(said[1]),
        "it rated the answer before it, with its words": [(one["value"], one["comment"]) for one in answer["feedback"]]
        == [(-1.0, "too long")],
        "it is in no prompt and no next state": COMMAND not in whole,
        "no request failed": counts["abandoned"] == 0,
    }


def told(found: dict[str, bool]) -> int:
    """Print each check; return 1 if one fails."""
    for what, holds in found.items():
        print(f"{'ok  ' if holds else 'FAIL'} {what}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

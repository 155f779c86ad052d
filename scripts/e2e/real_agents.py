"""Check real harnesses in episodes: terminus-2 through Harbor, mini-swe-agent, and OpenClaw inside the sandbox.

    scripts/e2e.sh real_agents FOLDER [--python .venv-agents/bin/python] [--only HARNESS] [--report FILE]

It needs bubblewrap, tmux, npm, and the interpreter of `scripts/agents/env.sh`. FOLDER keeps the installed OpenClaw;
every user must be able to pass through to it. The server and the runner are real; a stub engine says what the script
tells it. Each harness plays a group of two episodes. The first looks, has a reply cut by `max_tokens`, writes the file
that the task wants, and ends; the second ends at once. The script prints each check on a line. The turns are the model
calls, one for one. The steps count from 1, and each step's observation is what its command printed, also around the cut
reply. Both outcomes arrive, and the group's advantages follow from them. A command of OpenClaw's asks for the route of
outcomes from within, and is refused. The audit of the ledger finds nothing, and no process of a sandbox is left.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from e2e.codex_chat import TEMPLATE, told
from e2e.kill_agents import processes_of
from e2e.local_app import served
from e2e.openclaw_client import install
from openclaw_rl.testing import FakeEngine, Scripted, stub_app
from openclaw_rl.testing.ledger_audit import audit
from openclaw_rl.testing.running_server import RunningServer

ROOT = Path(__file__).resolve().parents[2]
CONTEXT, MAX_TOKENS, ACT_S = 65_536, 200, 240
CUT = "I think about it. " * MAX_TOKENS
"""A reply that `max_tokens` cuts."""
LOOK, WRITE = "echo seen-1; ls", "echo hello > hello.txt; echo seen-3"
INSTRUCTION = "Write the word hello to the file hello.txt."
OUTCOME = "http://127.0.0.1:30000/v1/episodes/x/outcome"
REFUSED = f"curl -s -o /dev/null -w 'answer-%{{http_code}}' -X POST -d '{{}}' {OUTCOME}"
"""A command of an agent that would post its own outcome."""
TEST = """\
if [ "$(cat /app/hello.txt 2>/dev/null)" = hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True, slots=True)
class Harness:
    """A harness, and the replies of its two episodes."""

    environment: str
    good: Sequence[str]
    bad: Sequence[str]
    seen: Sequence[str | None]
    """A part of the observation of each step of the good episode; None: there is none."""
    options: Mapping[str, object] = field(default_factory=dict)
    needs_python: bool = True


def terminus(keystrokes: str, *, is_done: bool = False) -> str:
    commands = [{"keystrokes": f"{keystrokes}\n", "duration": 1.0}] if keystrokes else []
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": is_done})


def mini_swe(command: str) -> str:
    return f"THOUGHT: go on.\n\n```mswea_bash_command\n{command}\n```"


def openclaw(command: str) -> str:
    called = {"name": "exec", "arguments": {"command": command}}
    return f"<tool_call>\n{json.dumps(called)}\n</tool_call>"


def harnesses(folder: Path, wanted: Sequence[str]) -> dict[str, Harness]:
    submit, done = mini_swe("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"), terminus("", is_done=True)
    found = {
        "terminus-2": Harness(
            "harbor",
            (terminus(LOOK), CUT, terminus(WRITE), done, done),
            (done, done),  # it asks whether the task is really complete
            ("seen-1", "exceeded", "seen-3", "", None),
        ),
        "mini-swe-agent": Harness(
            "mini_swe",
            (mini_swe(LOOK), CUT, mini_swe(WRITE), submit),
            (submit,),
            ("seen-1", "", "seen-3", None),
        ),
    }
    if "openclaw" in wanted:
        inst = install(folder).parents[1]
        found["openclaw"] = Harness(
            "inside",
            (openclaw(LOOK), openclaw(REFUSED), openclaw(WRITE), CUT),  # it ends with a cut reply
            ("It is written.",),
            ("seen-1", "answer-403", "seen-3", None),
            {
                "command": f'PATH="{inst}/node_modules/.bin:$PATH" openclaw agent exec --config "$HOME/openclaw.json"'
                f' --cwd /app --json --timeout {ACT_S} "$INSTRUCTION"',
                "programs": [str(inst)],
                # WebAssembly's trap handler reserves more address space than a sandbox may have.
                "env": {"NODE_OPTIONS": "--disable-wasm-trap-handler"},
                "files": {"openclaw.json": json.dumps(openclaw_config())},
            },
            needs_python=False,
        )
    return {name: harness for name, harness in found.items() if name in wanted}


def openclaw_config() -> dict[str, Any]:
    entry = {
        "id": "policy",
        "name": "policy",
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": CONTEXT,
        "maxTokens": MAX_TOKENS,
    }
    provider = {
        "baseUrl": "http://127.0.0.1:30000/v1",
        "apiKey": "none",
        "api": "openai-completions",
        "models": [entry],
    }
    return {
        "models": {"mode": "replace", "providers": {"rl": provider}},
        "agents": {
            "defaults": {
                "model": {"primary": "rl/policy"},
                "skipBootstrap": True,
                "contextInjection": "never",
                "skills": [],
            }
        },
        "tools": {"allow": ["exec"], "exec": {"host": "gateway", "security": "full", "ask": "off"}},
    }


def task_folder(folder: Path) -> Path:
    task = folder / "tasks" / "hello"
    for name, text in {
        "task.toml": 'version = "1.0"\n',
        "instruction.md": INSTRUCTION,
        "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY notes.txt .\n",
        "environment/notes.txt": "nothing here\n",
        "tests/test.sh": TEST,
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    return task


def plan_file(folder: Path, harness: Harness, server: RunningServer, python: Path) -> Path:
    """Write the plan of one group of two episodes, which are played one after the other."""
    folder.mkdir(parents=True)
    options = {"tasks": str(task_folder(folder)), "eval_share": 0.0, **harness.options}
    lines = [
        f'environment = "{harness.environment}"',
        'folder = "run"',
        f'server = "{server.url}"',
        *([f"python = {json.dumps(str(python.absolute()))}"] if harness.needs_python else []),
        f"sampling = {{ temperature = 1.0, max_tokens = {MAX_TOKENS} }}",
        "[train]",
        "groups = 1\ngroup_size = 2\nconcurrency = 1\nretries = 0",
        f"[limits]\nsteps = 8\nact_s = {ACT_S}.0",
        f'[sandbox]\nfolder = "{folder.parent / "sandboxes"}"',
        "memory_mb = 32768",  # of address space: V8 reserves gigabytes and uses little
        "[options]",
        *(f"{name} = {_toml(value)}" for name, value in options.items()),
    ]
    path = folder / "plan.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_toml(one)}" for name, one in value.items()) + " }"
    return json.dumps(value)


def play(
    name: str, harness: Harness, *, fake: FakeEngine, server: RunningServer, folder: Path, python: Path
) -> tuple[dict[str, bool], list[Any]]:
    """Play a group; return its checks and the records of its turns."""
    tokenizer = Tokenizer.from_file(str(next((server.data_dir / "cache").rglob("tokenizer.json"))))
    for text in (*harness.good, *harness.bad):
        fake.script(Scripted(ids=tuple(tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids)))
    asked = len(fake.calls)
    plan = plan_file(folder, harness, server, python)
    argv = [sys.executable, "-m", "openclaw_rl", "agents", "run", str(plan)]
    started = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, env=os.environ | {"PYTHONSAFEPATH": "1"})
    print(f"{name}: {time.monotonic() - started:.0f} s\n{done.stdout}{done.stderr[-3000:]}", flush=True)
    listed = server.admin("GET", "/v1/episodes?limit=2")["episodes"]
    episodes = [server.admin("GET", f"/v1/episodes/{one['episode_id']}") for one in reversed(listed)]
    turns = [server.admin("GET", f"/v1/turns/{turn['id']}") for episode in episodes for turn in episode["turns"]]
    found = checks(harness, episodes, turns, calls=len(fake.calls) - asked) | {
        "the run ended well": not done.returncode
    }
    return {f"{name}: {what}": holds for what, holds in found.items()}, turns


def checks(harness: Harness, episodes: list[Any], turns: list[Any], *, calls: int) -> dict[str, bool]:
    """Return what holds of a group's two episodes and their turns, in order."""
    sizes = [len(harness.good), len(harness.bad)]
    good, bad = turns[: sizes[0]], turns[sizes[0] :]
    replies = (*harness.good, *harness.bad)
    texts = [turn["turn"]["reply"] for turn in turns]
    return {
        "the turns are the model calls": calls == len(turns) == len(replies)
        and [len(episode["turns"]) for episode in episodes] == sizes,
        "the steps count in order": [turn["request"]["step"] for turn in turns]
        == [*range(1, sizes[0] + 1), *range(1, sizes[1] + 1)],
        "the replies are in order": len(texts) == len(replies)
        and all(_says(text, reply) for text, reply in zip(texts, replies, strict=True)),
        "each step has the observation of its own command": len(good) == len(harness.seen)
        and all(_fits(observation(turn), seen) for turn, seen in zip(good, harness.seen, strict=False)),
        "the next request answers each step": all(
            turn["answered_by"] == later["request"]["request_id"]
            for part in (good, bad)
            for turn, later in pairwise(part)
        ),
        "a cut reply is a step like any other": [turn["turn"]["finish_reason"] for turn in good]
        == ["length" if reply == CUT else _finish(turn) for reply, turn in zip(harness.good, good, strict=False)],
        "the outcomes arrived": [(one["state"], (one["outcome"] or {}).get("reward")) for one in episodes]
        == [("ended", 1.0), ("ended", -1.0)],
        "the advantages follow from them": [[turn["advantage"] for turn in one["turns"]] for one in episodes]
        == [[1.0] * sizes[0], [-1.0] * sizes[1]],
    }


def _says(reply: Mapping[str, Any], text: str) -> bool:
    if text == CUT:
        return (reply.get("content") or "").startswith("I think about it.")
    return json.dumps(text)[1:30] in json.dumps(reply.get("content") or "") or bool(reply.get("tool_calls"))


def _finish(turn: Mapping[str, Any]) -> str:
    return "tool_calls" if turn["turn"]["reply"].get("tool_calls") else "stop"


def observation(turn: Mapping[str, Any]) -> str | None:
    """Return the texts of a turn's next state; None: it has none."""
    state = turn["next_state"]
    return None if state is None else "\n".join(str(message["content"]) for message in state["messages"])


def _fits(found: str | None, seen: str | None) -> bool:
    if found is None or seen is None:
        return found is seen
    others = {"seen-1", "seen-3", "answer-403"} - {seen}
    return seen in found and not any(other in found for other in others)


def settings(engine: str, template: Path) -> list[str]:
    chosen = {
        "method.name": "agent",
        "method.process_weight": "0",
        "engine.kind": "url",
        "engine.url": engine,
        "trainer.kind": "external",
        "judge.kind": "rules",
        "model.context_length": str(CONTEXT),
        "model.chat_template": str(template),
        "model.tool_call_parser": "qwen25",
    }
    return [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-agents" / "bin" / "python")
    names = ("terminus-2", "mini-swe-agent", "openclaw")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--report", type=Path, help="JSON file for the records of the turns")
    options = parser.parse_args()
    if not options.python.exists() and {*options.only} != {"openclaw"}:
        parser.error(f"there is no {options.python}: scripts/agents/env.sh makes it")
    folder = options.folder.absolute()
    work = folder / f"agents-{int(time.time())}"
    work.mkdir(parents=True)
    (template := work / "template.jinja").write_text(TEMPLATE)
    (work / "sandboxes").mkdir(mode=0o755)
    fake = FakeEngine(context_length=CONTEXT)
    found: dict[str, bool] = {}
    report = {}
    with served(stub_app(fake)) as engine, RunningServer(work / "data", settings(engine, template)) as server:
        for name, harness in harnesses(folder, options.only).items():
            more, report[name] = play(
                name, harness, fake=fake, server=server, folder=work / name, python=options.python
            )
            found |= more
    findings = audit(work / "data" / "ledger.sqlite3", [], is_deep=True)
    print(*findings, sep="\n")
    found["the audit finds nothing"] = not findings
    found["no sandbox is left"] = not [*processes_of(work / "sandboxes")] and not [*(work / "sandboxes").iterdir()]
    if options.report:
        options.report.write_text(json.dumps(report, indent=1, ensure_ascii=False))
    return told(found)


if __name__ == "__main__":
    sys.exit(main())

"""Check tool-call and GUI environments on their real packages, the real server and a scripted engine.

    scripts/e2e.sh real_tools FOLDER [--python .venv-agents-tools/bin/python] [--only bfcl miniwob …]

The interpreters are made by `scripts/agents/env.sh tools` and `… browsergym`; GUI needs Chromium and bubblewrap. Every
environment plays one group of two episodes: the engine says what is right in the first one and what is wrong in the
second. The script prints each check on a line: the runner ends well, turns of the ledger are the model's calls, in
order, and the checker's verdicts are the outcomes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from e2e.codex_chat import CONTEXT, settings, told
from e2e.codex_chat import TEMPLATE as TOOLS_TEMPLATE
from e2e.local_app import served
from openclaw_rl.engines.base import Tap
from openclaw_rl.engines.dialect import GenerateReply, GenerateRequest
from openclaw_rl.testing import FakeEngine, Scripted, stub_app
from openclaw_rl.testing.running_server import RunningServer

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 600
Answer = Callable[[str, int], str]
"""From the prompt and the number of the policy's replies in it to the right reply."""

BFCL_TRUTH = """
import json
from openclaw_rl.agents.environments.bfcl import Bfcl
from openclaw_rl.agents.environments.bfcl_world import read
made, found = Bfcl(), {}
names = {one["name"]: list(one["parameters"]["properties"]) for docs in made._functions.values() for one in docs}
for task in made.tasks("train"):
    id_ = task.data["id"]
    turns = []
    for calls in made._truths[id_]:
        parsed = [read(call) for call in calls]
        turns.append([(name, dict(zip(names[name], places)) | given) for name, places, given in parsed])
    found[made._entries[id_]["question"][0][0]["content"]] = turns
print(json.dumps(found))
"""
TASKSET = """
import verifiers.v1 as vf


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward
    async def says_it(self, trace: vf.Trace) -> float:
        said = trace.assistant_messages
        return 1.0 if said and str(said[-1].content).strip() == self.data.word else 0.0


class Words(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for word in ("pear", "plum", "fig", "lime", "nut", "rye"):
            yield WordTask(WordData(name=word, prompt=f"Say {word}.", word=word), self.config.task)


__all__ = ["Words"]
"""


class Answering(FakeEngine):
    """An engine that says what is right in every even episode, and what is wrong in the odd ones."""

    def __init__(self) -> None:
        super().__init__(context_length=CONTEXT)
        self.tokenizer: Tokenizer | None = None
        self.right: Answer = lambda prompt, said: ""
        self.wrong = ""
        self.episodes = 0

    async def stream(self, request: GenerateRequest, tap: Tap | None = None) -> AsyncGenerator[GenerateReply, None]:
        assert self.tokenizer is not None
        prompt = self.tokenizer.decode(list(request.input_ids), skip_special_tokens=False)
        said = prompt.count("<|im_start|>assistant") - 1
        self.episodes += said == 0
        text = self.right(prompt, said) if self.episodes % 2 else self.wrong
        self.script(Scripted(ids=tuple(self.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids)))
        async for reply in super().stream(request, tap):
            yield reply


@dataclass(frozen=True)
class Case:
    """One environment, its plan, and what the engine says."""

    name: str
    options: Mapping[str, Any]
    right: Answer
    wrong: str
    outcomes: tuple[float, float]
    replies: tuple[int | None, int]
    """Of the right and of the wrong episode; None: as many as the task needs."""
    limits: Mapping[str, Any] = field(default_factory=dict)


def call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


def bfcl(python: Path) -> Case:
    done = subprocess.run([python, "-c", BFCL_TRUTH], capture_output=True, text=True, check=True, timeout=RUN_S)
    truths = json.loads(done.stdout)

    def right(prompt: str, said: int) -> str:
        turns = next(turns for question, turns in truths.items() if question in prompt)
        replies = [reply for calls in turns for reply in ("\n".join(call(*one) for one in calls), "Done.")]
        return str(replies[said])

    return Case("bfcl", {}, right, "I do nothing.", (1.0, -1.0), (None, 1))


def python_tool(folder: Path) -> Case:
    problems = [{"prompt": f"What is {n} / 8?", "label": f"{n}/8"} for n in range(1, 30)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))

    def right(prompt: str, said: int) -> str:
        found = re.search(r"What is (\d+) / 8", prompt)
        assert found
        if said == 0:
            return call("python", {"code": f"print({found[1]} / 8)"})
        return rf"It is \boxed{{{prompt.rsplit('<|im_start|>tool', 1)[1].split()[0]}}}."

    return Case(
        "python_tool", {"tasks": str(folder / "problems.jsonl")}, right, r"It is \boxed{9}.", (1.0, -1.0), (2, 1)
    )


def miniwob() -> Case:
    def right(prompt: str, said: int) -> str:
        found = re.findall(r'button "Click Me!" \[ref=(e\d+)\]', prompt)
        return f"The button is there.\nclick('{found[-1]}')"

    return Case("miniwob", {"pages": ["click-test"]}, right, "wait()", (1.0, -1.0), (1, 2), {"steps": 2})


def browsergym() -> Case:
    def right(prompt: str, said: int) -> str:
        found = re.findall(r"\[(\w+)\] button 'Click Me!'", prompt)
        return f"click('{found[-1]}')"

    return Case("browsergym", {"pages": ["click-test"]}, right, "noop()", (1.0, -1.0), (1, 2), {"steps": 2})


def verifiers(folder: Path) -> Case:
    (folder / "packages").mkdir(exist_ok=True)
    (folder / "packages" / "words_taskset.py").write_text(TASKSET)

    def right(prompt: str, said: int) -> str:
        found = re.search(r"Say (\w+)\.", prompt)
        assert found
        return found[1]

    options = {"taskset": "words_taskset", "runtime": "subprocess"}  # a chat loop: no code runs
    return Case("verifiers", options, right, "I will not.", (1.0, -1.0), (1, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-agents-tools" / "bin" / "python")
    parser.add_argument("--browsergym-python", type=Path, default=ROOT / ".venv-agents-browsergym" / "bin" / "python")
    parser.add_argument("--only", nargs="+", default=[], help="names of environments")
    options = parser.parse_args()
    folder = options.folder.absolute() / f"tools-{int(time.time())}"
    folder.mkdir(parents=True)
    template = folder / "template.jinja"
    template.write_text(TOOLS_TEMPLATE)
    makers: dict[str, Callable[[], Case]] = {
        "bfcl": lambda: bfcl(options.python),
        "python_tool": lambda: python_tool(folder),
        "miniwob": miniwob,
        "browsergym": browsergym,
        "verifiers": lambda: verifiers(folder),
    }
    fake = Answering()
    found: dict[str, bool] = {}
    with (
        served(stub_app(fake)) as engine,
        RunningServer(folder / "data", ["--method", "agent", *settings(engine, template)]) as server,
    ):
        fake.tokenizer = Tokenizer.from_file(str(next((server.data_dir / "cache").rglob("tokenizer.json"))))
        for name, make in makers.items():
            if not options.only or name in options.only:
                python = options.browsergym_python if name == "browsergym" else options.python
                found |= checks(make(), fake, server, python, folder)
    return told(found)


def checks(case: Case, fake: Answering, server: RunningServer, python: Path, folder: Path) -> dict[str, bool]:
    """Play one group; return the checks of what the ledger holds."""
    fake.right, fake.wrong, fake.episodes = case.right, case.wrong, 0
    before, calls = {one["episode_id"] for one in episodes_of(server)}, len(fake.calls)
    began = time.monotonic()
    done = run(case, server, python, folder)
    print(done.stdout, done.stderr, f"{case.name}: {time.monotonic() - began:.0f} s", sep="", flush=True)
    calls = len(fake.calls) - calls
    new = sorted(
        (one for one in episodes_of(server) if one["episode_id"] not in before), key=lambda one: one["opened_at"]
    )
    episodes = [server.admin("GET", f"/v1/episodes/{one['episode_id']}") for one in new]
    outcomes = [episode["outcome"] or {"reward": None, "truncated": None} for episode in episodes]
    turns = [episode["turns"] for episode in episodes]
    print(f"{case.name}: {calls} calls, {[len(of) for of in turns]} turns, {outcomes}", flush=True)
    found = {
        "the runner plays the group to its end": done.returncode == 0,
        "both episodes ended": [episode["state"] for episode in episodes] == ["ended", "ended"],
        "the model's calls are the turns": calls == sum(map(len, turns)),
        "steps are in order": all([one["step"] for one in of] == list(range(1, len(of) + 1)) for of in turns),
        "right and wrong episode have their lengths": len(turns) == len(case.replies)
        and all(n is None or len(of) == n for n, of in zip(case.replies, turns, strict=True)),
        "the checker's verdicts are the outcomes": tuple(one["reward"] for one in outcomes) == case.outcomes,
        "a limit of steps truncates, and nothing else": [one["truncated"] for one in outcomes]
        == [False, bool(case.limits)],
    }
    return {f"{case.name}: {what}": holds for what, holds in found.items()}


def episodes_of(server: RunningServer) -> list[Any]:
    return list(server.admin("GET", "/v1/episodes?limit=200")["episodes"])


def run(case: Case, server: RunningServer, python: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    plan = folder / f"{case.name}.toml"
    options = "\n".join(f"{name} = {json.dumps(value)}" for name, value in case.options.items())
    limits = "\n".join(f"{name} = {json.dumps(value)}" for name, value in case.limits.items())
    plan.write_text(
        f'environment = "{case.name}"\nfolder = "{case.name}"\npython = "{python.absolute()}"\n'
        "sampling = { temperature = 1.0, max_tokens = 512 }\n"
        f"[options]\n{options}\n[limits]\n{limits}\n"
        "[train]\ngroups = 1\ngroup_size = 2\nconcurrency = 1\nretries = 0\n"
    )
    return subprocess.run(
        [sys.executable, "-m", "openclaw_rl", "agents", "run", plan, "--server", server.url],
        env=os.environ | {"PYTHONPATH": str(folder / "packages")},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())

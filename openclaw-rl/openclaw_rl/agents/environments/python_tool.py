r"""Problems with one right answer, and a Python tool: DAPO, AIME, and any other JSONL file that the plan names.

A line is {"prompt": …, "label": …}. The problem may also be called `problem` or `question`, and may be a list of
messages. The answer may also be called `answer`, or stand in `reward_model.ground_truth`. Python that the policy writes
runs in the episode's sandbox. The answer is what stands in the last \boxed{}, else behind the last `Answer:`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.environments.child import Child, ChildGone
from openclaw_rl.agents.environments.harbor_tasks import split_of
from openclaw_rl.agents.environments.tool_loop import Call, tool, tool_loop, tool_reward
from openclaw_rl.agents.episode import Episode
from openclaw_rl.agents.sandbox import Sandbox

_SYSTEM = (
    "Solve the problem. You can run Python with the tool `python`; print what you want to see. Each run is a new "
    r"process. Put the final answer in \boxed{}."
)
_TOOL = tool(
    "python",
    "Run a Python program and return what it prints.",
    {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
_MATH = Path(__file__).with_name("math_answers.py")
_CHECK_S, _SHOWN_CHARS = 20.0, 4000
_PROBLEM, _ANSWER = ("prompt", "problem", "question"), ("label", "answer", "ground_truth")


class PythonTool:
    """Problems of a file."""

    needs_sandbox = True

    def __init__(
        self, tasks: str, eval_tasks: str | None = None, eval_share: float = 0.2, seed: int = 0, call_s: float = 30.0
    ) -> None:
        """tasks: a JSONL file. eval_tasks: of the held-out problems; without it a seeded share of `tasks` is held out.
        call_s: time of one run of Python."""
        found = _read(Path(tasks).expanduser())
        if eval_tasks is None:
            held_out = {id_ for id_ in found if split_of(id_, eval_share, seed) == "eval"}
            others = {id_: task for id_, task in found.items() if id_ in held_out}
        else:
            others = _read(Path(eval_tasks).expanduser())
        self._tasks: dict[Split, dict[str, Task]] = {
            "train": {id_: task for id_, task in found.items() if id_ not in others},
            "eval": others,
        }
        self._call_s = call_s
        self._math = Child(_MATH)

    def tasks(self, split: Split) -> Sequence[Task]:
        return list(self._tasks[split].values())

    async def run(self, task: Task, episode: Episode) -> Outcome:
        messages: list[dict[str, object]] = [{"role": "system", "content": _SYSTEM}]
        said = task.data["messages"]
        assert isinstance(said, list)
        calls, text = 0, ""
        async with episode.sandbox() as sandbox:

            async def make(call: Call) -> str:
                nonlocal calls
                calls += 1
                return await self._call(call, sandbox)

            async with episode.acting():
                text = (await tool_loop(episode, [*messages, *said], [_TOOL], make)).text
        async with episode.checking():
            right = await self._is_right(answer_of(text), str(task.data["answer"]))
        return Outcome(tool_reward(calls, right=right), {"calls": float(calls)})

    async def close(self) -> None:
        await self._math.close()

    async def _call(self, call: Call, sandbox: Sandbox) -> str:
        code = (call.arguments or {}).get("code")
        if call.name != "python" or not isinstance(code, str):
            return "Error: the one tool is python, with the text `code`"
        # By standard input, and -I: files of an earlier run are no modules of this one.
        done = await sandbox.run(("python3", "-I", "-"), stdin=code.encode("utf-8", "replace"), timeout_s=self._call_s)
        if done.ended_by is not None:
            return f"Error: the run was ended by the limit of {done.ended_by}"
        text = done.text
        half = _SHOWN_CHARS // 2
        return text if len(text) <= _SHOWN_CHARS else f"{text[:half]}\n…\n{text[-half:]}"

    async def _is_right(self, said: str | None, right: str) -> bool:
        if said is None:
            return False
        if said == right.strip():
            return True
        try:
            return bool((await self._math.ask({"said": said, "right": right}, _CHECK_S))["equal"])
        except ChildGone:
            return False  # an answer that cannot be compared in this time is none


def answer_of(text: str) -> str | None:
    r"""Return what stands in the last \boxed{} of a reply, else behind its last `Answer:`, else None."""
    at = text.rfind(r"\boxed{")
    if at >= 0:
        start = at + len(r"\boxed{")
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end].strip()
        return None
    found = re.findall(r"^.*\bAnswer:[ \t*]*(.+)$", text, re.MULTILINE | re.IGNORECASE)
    return found[-1].strip().strip("$").strip() if found else None


def _read(file: Path) -> dict[str, Task]:
    """Read problems; the same one twice is one task. Raises ValueError with the line that is wrong."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    found: dict[str, Task] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages, answer = _problem(json.loads(line))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}, line {number}: {error}") from error
        name = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
        found.setdefault(name, Task(f"python_tool/{name}", data={"messages": messages, "answer": answer}))
    if not found:
        raise ValueError(f"{file} has no problems")
    return found


def _problem(row: Mapping[str, Any]) -> tuple[list[dict[str, str]], str]:
    if not isinstance(row, dict):
        raise ValueError("a line is one JSON object")
    lower = {name.lower(): value for name, value in row.items()}
    lower |= lower["reward_model"] if isinstance(lower.get("reward_model"), dict) else {}
    problem = next((lower[name] for name in _PROBLEM if lower.get(name)), None)
    answer = next((lower[name] for name in _ANSWER if lower.get(name) not in (None, "")), None)
    if isinstance(problem, str):
        problem = [{"role": "user", "content": problem}]
    if not isinstance(problem, list) or not all(isinstance(one.get("content"), str) for one in problem):
        raise ValueError(f"no problem: {', '.join(_PROBLEM)} is a text or a list of messages")
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise ValueError(f"no answer: {', '.join(_ANSWER)} is a text or a number")
    messages = [{"role": str(one.get("role", "user")), "content": one["content"]} for one in problem]
    return messages, str(answer)

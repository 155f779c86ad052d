"""The SWE miniature: a function of two lines has a bug, and the policy writes it anew so that its test passes.

The function runs in a fresh sandbox on arguments alone. The expected values never enter it: a function that prints a
verdict, ends the process or looks for the test wins nothing.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.environments import swe_bugs
from openclaw_rl.agents.episode import Episode

_SYSTEM = "You fix Python functions. Answer with the whole function alone."
_EXAMPLES = (
    ("def add(x, y):\n    return x - y", "add(2, 3) == 5", "def add(x, y):\n    return x + y"),
    ("def last(items):\n    return items[0]", "last([1, 2]) == 2", "def last(items):\n    return items[-1]"),
    ("def greet(s):\n    return s + 'Hi '", "greet('Bo') == 'Hi Bo'", "def greet(s):\n    return 'Hi ' + s"),
)
_RUN = """
import json, sys
told = json.load(open("arguments.json"))
space = {}
exec(compile(open("solution.py").read(), "solution.py", "exec"), space)
found = []
for argument in told["arguments"]:
    try:
        found.append(repr(space[told["name"]](argument)))
    except Exception as error:
        found.append(f"raised {error!r}")
sys.__stdout__.write(told["mark"] + json.dumps(found))
"""
_CHECK_S = 10.0
_WORDS = ("apple", "bee", "", "cat", "alpha", "Table", "zoo", "Orange", "me", "banana")
_ARGUMENTS: dict[str, Sequence[Any]] = {
    "int": (-7, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 25),
    "small": (-2, 0, 1, 2, 3, 5),
    "word": tuple(word for word in _WORDS if word),
    "word_or_empty": _WORDS,
    "numbers": ([3, 1, 2], [5, 5, 1, 9], [4, 8], [-1, 0, 7], [2, 2, 2], [6, 3, 9, 1, 4]),
}
_NAMES = {"x": ("x", "n", "a", "value"), "s": ("s", "text", "word"), "items": ("items", "numbers", "values")}


@dataclass(frozen=True, slots=True)
class Bug:
    """One function with a bug."""

    name: str
    wrong: str
    right: str
    example: str
    """A test of the prompt, which the wrong function fails."""
    arguments: tuple[Any, ...]
    expected: tuple[str, ...]
    """`repr` of what the right function returns."""


class SweMini:
    """One-step tasks; functions of the two splits are different ones."""

    needs_sandbox = True

    def __init__(
        self,
        train_tasks: int = 512,
        eval_tasks: int = 200,
        seed: int = 0,
        show_test: bool = False,
        functions: int = 86,
    ) -> None:
        """Make the tasks.

        show_test: show the failing test, too. The bundled model passes 0.24 with it and 0.35 by the name alone.
        functions: practise the first ones of `swe_bugs.TRAIN`.
        """
        self._counts: dict[str, int] = {"train": train_tasks, "eval": eval_tasks}
        self._seed, self._show_test, self._functions = seed, show_test, functions

    def tasks(self, split: Split) -> Sequence[Task]:
        lines = lines_of(split)[: self._functions if split == "train" else None]
        dice = random.Random(f"{self._seed}:{split}")
        found: dict[str, Task] = {}
        for number in range(100 * self._counts[split]):
            line = lines[number % len(lines)]
            bug = make_bug(line, dice)
            id_ = f"swe_mini/{split}/{bug.name}/{_slug(bug)}"
            found.setdefault(id_, Task(id_, line.split("|")[0], {"bug": bug}))
            if len(found) == self._counts[split]:
                break
        return list(found.values())

    async def run(self, task: Task, episode: Episode) -> Outcome:
        bug = task.data["bug"]
        assert isinstance(bug, Bug)
        text = ""
        async with episode.acting():
            text = code_of((await episode.ask(messages_of(bug, show_test=self._show_test))).text)
        mark = f"{random.getrandbits(128):032x}"
        told = {"name": bug.name, "arguments": bug.arguments, "mark": mark}
        files = {"solution.py": text.encode("utf-8", "replace"), "arguments.json": json.dumps(told).encode()}
        async with episode.sandbox(files=files) as sandbox, episode.checking():
            done = await sandbox.run(("python3", "-I", "-c", _RUN), timeout_s=_CHECK_S)
        passed = _found(done.output, mark) == list(bug.expected)
        return Outcome(1.0 if passed else -1.0)


def lines_of(split: Split) -> list[str]:
    return (swe_bugs.TRAIN if split == "train" else swe_bugs.EVAL).strip().splitlines()


def numbers_of(kind: str) -> range:
    """Return the numbers that K may be, beside arguments of this kind."""
    return range(2, 4) if kind in ("small", "word") else range(2, 10)


def make_bug(line: str, dice: random.Random) -> Bug:
    """Make a function of one line of `swe_bugs`, and its bug."""
    name, argument, right, wrongs, kind = line.split("|")
    k = str(dice.choice(numbers_of(kind)))
    name, right = name.replace("K", k), right.replace("K", k)
    renamed = dice.choice(_NAMES[argument])
    right = re.sub(rf"\b{argument}\b", renamed, right)
    arguments = tuple(_ARGUMENTS[kind])
    expected = _values(right, renamed, arguments)
    for wrong in dice.sample(wrongs.split(";"), len(wrongs.split(";"))):
        wrong = re.sub(rf"\b{argument}\b", renamed, wrong.replace("K", k))
        found = _values(wrong, renamed, arguments)
        # A test of the prompt shows a value, never an error.
        differs = [n for n, value in enumerate(expected) if found[n] != value and not value.startswith("raised")]
        if differs:
            shown = dice.choice(differs)
            text, fixed = (f"def {name}({renamed}):\n    return {body}" for body in (wrong, right))
            return Bug(name, text, fixed, f"{name}({arguments[shown]!r}) == {expected[shown]}", arguments, expected)
    raise ValueError(f"no bug of {name} shows on its arguments")


def _values(body: str, argument: str, arguments: Sequence[Any]) -> tuple[str, ...]:
    """Evaluate an expression of `swe_bugs`; never a model's."""
    function = eval(f"lambda {argument}: {body}")
    return tuple(_value(function, one) for one in arguments)


def _value(function: Any, argument: Any) -> str:
    try:
        return repr(function(argument))
    except (IndexError, ZeroDivisionError, TypeError) as error:
        return f"raised {error!r}"


def messages_of(bug: Bug, *, show_test: bool) -> list[dict[str, object]]:
    def asked(code: str, test: str) -> str:
        return f"{code}\nThe test fails: {test}" if show_test else code

    messages: list[dict[str, object]] = [{"role": "system", "content": _SYSTEM}]
    for code, test, fixed in _EXAMPLES:
        messages += [{"role": "user", "content": asked(code, test)}, {"role": "assistant", "content": fixed}]
    return [*messages, {"role": "user", "content": asked(bug.wrong, bug.example)}]


def code_of(reply: str) -> str:
    """Return the function of a reply: the first code block, else the text from `def` to the end of the function."""
    if block := re.search(r"```(?:\w+\n)?(.*?)(?:```|$)", reply, re.DOTALL):
        reply = block[1]
    lines = reply.strip().splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith("def ")), 0)
    kept = lines[first : first + 1]
    for line in lines[first + 1 :]:
        if line and not line[0].isspace():
            break
        kept.append(line)
    return "\n".join(kept) + "\n"


def _found(output: bytes, mark: str) -> list[str] | None:
    text = output.decode("utf-8", "replace")
    try:
        found = json.loads(text.rpartition(mark)[2]) if mark in text else None
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _slug(bug: Bug) -> str:
    return re.sub(r"[^\w.+=*<>%!-]+", "_", f"{bug.wrong.partition('return ')[2]}_{bug.example}")

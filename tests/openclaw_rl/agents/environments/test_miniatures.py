"""The miniatures in real sandboxes, played by scripts: what is right, what is wrong, and what wins nothing."""

import random
import re
from collections.abc import Callable

import pytest

from openclaw_rl.agents.environment import Environment, Outcome, Split, Task, whole_tasks
from openclaw_rl.agents.environments.swe_mini import Bug, SweMini, code_of, lines_of, make_bug, numbers_of
from openclaw_rl.agents.environments.terminal_find import TerminalFind
from openclaw_rl.agents.environments.terminal_mini import KINDS, Request, TerminalMini, command_of, share_of

Play = Callable[..., object]


def first_of(environment: Environment, kind: str) -> Task:
    return next(task for task in whole_tasks(environment, "train") if task.kind == kind)


def words(task: Task) -> list[str]:
    request = task.data["request"]
    assert isinstance(request, Request)
    return re.findall(r"\w+\.\w+|(?<=named )\w+", request.text)


RIGHT = {"cat": "cat {0}", "mkdir": "mkdir {0}", "rm": "rm {0}", "cp": "cp {0} {1}", "touch": "touch {0}"}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_right_command_passes_and_doing_nothing_fails(kind: str, play: Play) -> None:
    environment = TerminalMini(train_tasks=10, named_share=0)
    task = first_of(environment, kind)
    right = RIGHT[kind].format(*words(task))
    assert await play(environment, task, right) == Outcome(1.0, {"share": 1.0})
    assert await play(environment, task, f"```bash\n$ {right}\n```\nThis does it.") == Outcome(1.0, {"share": 1.0})
    for wrong in ("true", "", "no such command", "ls", "cat /etc/passwd", "kill -9 -1", "exit 0"):
        assert (await play(environment, task, wrong)).reward == -1.0, wrong


async def test_a_move_is_no_delete_and_a_side_effect_is_not_right(play: Play) -> None:
    environment = TerminalMini(train_tasks=10, named_share=0)
    rm, cp = first_of(environment, "rm"), first_of(environment, "cp")
    (gone,), (old, new) = words(rm), words(cp)
    assert (await play(environment, rm, f"mv {gone} other")).reward == 0.0
    assert (await play(environment, rm, "rm *")).reward == 0.0
    assert (await play(environment, rm, f"rm {gone}; touch {gone}")).reward == -1.0
    assert (await play(environment, cp, f"mv {old} {new}")).reward == 0.0
    assert (await play(environment, cp, f"cp {old} {new}; rm -rf /tmp/*; mkdir x")).reward == 0.0


def test_half_of_the_training_tasks_name_the_command_and_no_held_out_one() -> None:
    environment = TerminalMini()
    for split, share in (("train", 0.5), ("eval", 0.0)):
        tasks = whole_tasks(environment, split)
        named = [task for task in tasks if task.kind.endswith(", named")]
        assert len(named) / len(tasks) == pytest.approx(share, abs=0.08)
        assert all(f"Use {task.kind.split(',')[0]}: " in repr(task.data) for task in named)


def test_a_share_is_of_wanted_and_made_changes_together() -> None:
    request = Request("", {"a": "1"}, {"b": "2", "c/": ""}, output="said")
    before = {"a": b"1"}
    assert share_of(request, before, {"a": b"1", "b": b"2", "c/": b""}, b"said\n") == 1.0
    assert share_of(request, before, {"a": b"1", "b": b"2"}, b"other") == 1 / 3
    assert share_of(request, before, {"b": b"2", "c/": b""}, b"said") == 3 / 4
    assert share_of(request, before, None, b"said") == 0.0


@pytest.mark.parametrize(
    ("reply", "command"),
    [("cat a", "cat a"), ("\n> cat a\nmore", "cat a"), ("`cat a`", "cat a"), ("```\ncat a\n```", "cat a"), ("", "")],
)
def test_a_command_is_the_first_line_or_the_block(reply: str, command: str) -> None:
    assert command_of(reply) == command


async def test_three_steps_find_the_line(play: Play) -> None:
    environment = TerminalFind(train_tasks=3)
    task = whole_tasks(environment, "train")[0]
    seen: list[str] = []

    def script(messages: list[dict[str, str]]) -> str:
        last = messages[-1]["content"]
        seen.append(last)
        if last.startswith("Word: "):
            return "ls"
        word = next(m["content"] for m in reversed(messages) if m["content"].startswith("Word: ")).split()[1]
        return f"grep -l {word} {last}/*" if "/" not in last else f"tail -n 1 {last}"

    assert await play(environment, task, script) == Outcome(1.0, {"steps": 3})
    assert len(seen) == 3
    assert (await play(environment, task, "cat */*")).reward == -1.0
    assert (await play(environment, task, "ls")).metrics == {"steps": 4}


async def test_a_right_function_passes_and_the_bug_fails(play: Play) -> None:
    environment = SweMini(train_tasks=100)
    for task in whole_tasks(environment, "train")[:45:5]:
        bug = task.data["bug"]
        assert isinstance(bug, Bug)
        assert await play(environment, task, f"```python\n{bug.right}\n```") == Outcome(1.0)
        assert await play(environment, task, bug.wrong) == Outcome(-1.0)


@pytest.mark.parametrize(
    "cheat",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "import builtins\nbuiltins.repr = lambda value: 'True'",
        "while True: pass",
        "print(open('arguments.json').read())",
        "open('/logs/verifier/reward.txt', 'w').write('1')",
        "def {name}(x): raise SystemExit",
        "(",
    ],
)
async def test_a_function_that_cheats_wins_nothing(cheat: str, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openclaw_rl.agents.environments.swe_mini.code_of", lambda reply: reply)
    monkeypatch.setattr("openclaw_rl.agents.environments.swe_mini._CHECK_S", 2)
    environment = SweMini(train_tasks=50)
    task = first_of(environment, "square")
    assert await play(environment, task, cheat.replace("{name}", "square")) == Outcome(-1.0)


def test_there_are_sixty_bugs_and_no_function_is_in_both_splits() -> None:
    train, held_out = ({line.split("|")[0] for line in lines_of(split)} for split in ("train", "eval"))
    assert len(lines_of("train")) + len(lines_of("eval")) >= 60
    assert not train & held_out
    assert not bodies("train") & bodies("eval")
    for line in (*lines_of("train"), *lines_of("eval")):
        for seed in range(20):
            bug = make_bug(line, random.Random(seed))
            assert bug.right != bug.wrong


def test_the_number_of_practised_functions_is_chosen() -> None:
    for functions in (5, 86, 151):
        tasks = {split: whole_tasks(SweMini(functions=functions), split) for split in ("train", "eval")}
        assert {task.kind for task in tasks["train"]} == {line.split("|")[0] for line in lines_of("train")[:functions]}
        assert tasks["eval"] == whole_tasks(SweMini(), "eval")
    assert len(lines_of("train")) == 151


def bodies(split: Split) -> set[str]:
    """Return the right expression of each function of a split, whatever the name of its argument."""
    found = set()
    for _, argument, right, _, kind in (line.split("|") for line in lines_of(split)):
        found |= {re.sub(rf"\b{argument}\b", "_", right.replace("K", str(k))) for k in numbers_of(kind)}
    return found


def test_code_is_the_block_or_the_function() -> None:
    function = "def f(x):\n    return x\n"
    for reply in (function, f"Sure:\n{function}That is all.", f"```python\n{function}```", f"```\n{function}"):
        assert code_of(reply) == function
    assert code_of("") == "\n"


@pytest.mark.parametrize("environment", [TerminalMini(), TerminalFind(), SweMini()], ids=lambda e: type(e).__name__)
def test_the_splits_are_disjoint_by_content_and_stay(environment: Environment) -> None:
    train, held_out = whole_tasks(environment, "train"), whole_tasks(environment, "eval")
    assert (len(train), len(held_out)) == (512, 200)
    assert not {task.id for task in train} & {task.id for task in held_out}
    assert [task.id for task in whole_tasks(environment, "train")] == [task.id for task in train]
    contents = [{repr(task.data) for task in tasks} for tasks in (train, held_out)]
    assert not contents[0] & contents[1]
    assert len(contents[1]) == 200

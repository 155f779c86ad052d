"""The miniatures that need no sandbox, tool calls and GUI, played by scripts: what is right, and what is not."""

import json
from collections.abc import Callable

import pytest

from openclaw_rl.agents.environment import Environment, Outcome, Task, whole_tasks
from openclaw_rl.agents.environments.gui_mini import KINDS, GuiMini, PageTask, played
from openclaw_rl.agents.environments.toolcall_mini import TOOLS, ToolcallMini, call_of

Play = Callable[..., object]


def first_of(environment: Environment, kind: str) -> Task:
    return next(task for task in whole_tasks(environment, "train") if task.kind == kind)


@pytest.mark.parametrize("tool", TOOLS)
async def test_the_right_call_passes_and_no_other(tool: str, play: Play) -> None:
    environment = ToolcallMini(train_tasks=8)
    task = first_of(environment, tool)
    call = dict(task.data["call"])
    assert call["tool"] == tool
    assert str(call["input"]) in str(task.data["request"])
    assert await play(environment, task, f" {json.dumps(call)}\n") == Outcome(1.0, {"form": 1.0})
    assert await play(environment, task, json.dumps(call | {"input": "other"})) == Outcome(-1.0, {"form": 1.0})
    for wrong in (call | {"more": 1}, {"tool": tool}, call | {"tool": "sing"}, [call], call | {"tool": [tool]}):
        assert await play(environment, task, json.dumps(wrong)) == Outcome(-1.0, {"form": 0.0}), wrong


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "weather",
        '{"tool": "play", "input": "A"} That plays it.',
        '{"tool": "play",\n "input": "A"}',
        '{"tool": "call", "tool": "play", "input": "A"}',
        "[" * 100_000,
        "__import__('os').system('true')",
    ],
)
def test_a_call_is_one_line_of_json(reply: str) -> None:
    assert call_of(reply) is None


PAGE = PageTask((("button", "Save"), ("field", "City"), ("box", "News")), "type in City: Rome", "City", "Rome")


@pytest.mark.parametrize(
    ("reply", "state"),
    [
        ("click('Save')", {"Save": "clicked"}),
        ('type("City", "Rome")', {"City": "Rome"}),
        ("type('City', '')", {"City": ""}),
        (" check('News')\n", {"News": "checked"}),
        ("check('Save')", {}),
        ("click('Cancel')", {}),
        ("click('Save', 'now')", None),
        ("type('City')", None),
        ("click('Save'); click('Save')", None),
        ("drag('Save')", None),
        ("", None),
    ],
)
def test_an_action_changes_the_page(reply: str, state: dict[str, str] | None) -> None:
    assert played(PAGE, reply) == state


@pytest.mark.parametrize("kind", KINDS)
async def test_the_right_action_passes_and_no_other(kind: str, play: Play) -> None:
    environment = GuiMini(train_tasks=6)
    task = first_of(environment, kind)
    page = task.data["page"]
    assert isinstance(page, PageTask)
    right = f"type('{page.changed}', '{page.value}')" if kind == "type" else f"{kind}('{page.changed}')"
    assert await play(environment, task, right) == Outcome(1.0, {"form": 1.0})
    assert await play(environment, task, f"{right}\n{right}") == Outcome(-1.0, {"form": 0.0})
    for role, name in page.elements:
        other = {"button": f"click('{name}')", "box": f"check('{name}')", "field": f"type('{name}', 'x')"}[role]
        if other != right:
            assert await play(environment, task, other) == Outcome(-1.0, {"form": 1.0})


@pytest.mark.parametrize("make", [ToolcallMini, GuiMini])
def test_the_splits_are_disjoint_by_content_and_stay(make: Callable[..., Environment]) -> None:
    train, held_out = (whole_tasks(make(), split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (512, 200)
    contents = [{repr(task.data) for task in tasks} for tasks in (train, held_out)]
    assert (len(contents[0]), len(contents[1])) == (512, 200)
    assert not contents[0] & contents[1]
    assert whole_tasks(make(), "train") == train
    assert whole_tasks(make(seed=1), "train") != train


def test_held_out_values_are_in_no_training_task() -> None:
    train, held_out = (whole_tasks(ToolcallMini(), split) for split in ("train", "eval"))
    values = [{str(dict(task.data["call"])["input"]) for task in tasks} for tasks in (train, held_out)]
    assert not values[0] & values[1]
    pages = [[task.data["page"] for task in whole_tasks(GuiMini(), split)] for split in ("train", "eval")]
    names = [{name for page in of for _, name in page.elements} for of in pages]
    assert not names[0] & names[1]


def test_more_tool_calls_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="eval_tasks is 300, and there are 224 requests"):
        ToolcallMini(eval_tasks=300).tasks("eval")

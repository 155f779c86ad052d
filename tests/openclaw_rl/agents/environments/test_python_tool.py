"""Problems with a Python tool in real sandboxes; the comparison of formulas is a stand-in of math-verify's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_episodes import calling, script

from openclaw_rl.agents.environment import Outcome, load, whole_tasks
from openclaw_rl.agents.environments import python_tool
from openclaw_rl.agents.environments.python_tool import PythonTool, answer_of
from openclaw_rl.errors import SettingsError

Play = Callable[..., Any]
LINES = (
    {"prompt": "What is 3 + 4?", "label": "7"},
    {"prompt": [{"role": "user", "content": "What is 1 / 2?"}], "label": "1/2"},
    {"problem": "What is 200 + 4?", "answer": 204},
    {"Problem": "What is 5 - 2?", "Answer": "3"},
    {"prompt": [{"role": "user", "content": "What is 2 * 4?"}], "reward_model": {"ground_truth": "8"}, "ability": "M"},
    {"prompt": "What is 3 + 4?", "label": "7"},
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    math = tmp_path / "math.py"
    math.write_text("def answer(asked):\n    return {'equal': {asked['said'], asked['right']} == {'0.5', '1/2'}}\n")
    monkeypatch.setattr(python_tool, "_MATH", math)
    made = tmp_path / "tasks.jsonl"
    made.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return made


def test_the_known_forms_are_read_and_a_repeated_problem_is_one_task(file: Path) -> None:
    environment = PythonTool(str(file), eval_share=0)
    tasks = whole_tasks(environment, "train")
    assert [task.data["answer"] for task in tasks] == ["7", "1/2", "204", "3", "8"]
    assert not environment.tasks("eval")
    halves = PythonTool(str(file), eval_share=0.5)
    assert {task.id for task in (*halves.tasks("train"), *halves.tasks("eval"))} == {task.id for task in tasks}


def test_a_problem_of_the_held_out_file_is_in_no_training_task(file: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    environment = PythonTool(str(file), eval_tasks=str(tmp_path / "eval.jsonl"))
    assert [len(environment.tasks(split)) for split in ("train", "eval")] == [4, 1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: "),
        ("[1]", "line 2: a line is one JSON object"),
        ('{"prompt": "x"}', "line 2: no answer: label, answer, ground_truth"),
        ('{"label": "x"}', "line 2: no problem: prompt, problem, question"),
        ('{"prompt": [1], "label": "x"}', "line 2: "),
    ],
)
def test_a_broken_line_is_named(line: str, words: str, file: Path) -> None:
    file.write_text(f"{json.dumps(LINES[0])}\n{line}\n")
    with pytest.raises(SettingsError, match=words):
        load("python_tool", {"tasks": str(file)})


@pytest.mark.parametrize(("text", "words"), [("\n", "has no problems"), (None, "No such file")])
def test_a_file_without_problems_is_an_error(text: str | None, words: str, file: Path) -> None:
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(SettingsError, match=words):
        load("python_tool", {"tasks": str(file)})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So it is \boxed{7}.", "7"),
        (r"\boxed{1} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"Answer: 5 and \boxed{", None),
        ("Thus.\nAnswer: $204$", "204"),
        ("**Answer:** 7", "7"),
        ("It is 7.", None),
        ("", None),
    ],
)
def test_an_answer_is_boxed_or_behind_the_word(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


async def test_python_runs_in_the_sandbox_and_the_answer_counts(file: Path, play: Play) -> None:
    environment = PythonTool(str(file), eval_share=0)
    seven, half, *_ = whole_tasks(environment, "train")
    seen: list[str] = []

    def say(messages: list[dict[str, Any]]) -> object:
        last = messages[-1]
        seen.append(str(last["content"]))
        if last["role"] == "user":
            return calling(("python", {"code": "print(3 + 4)\nopen('seven.py', 'w').write('x = 7')"}))
        return calling(("python", {"code": "import seven"})) if last["content"] == "7\n" else r"\boxed{7}"

    assert await play(environment, seven, say) == Outcome(1.0, {"calls": 2})
    assert "ModuleNotFoundError" in seen[2]
    assert await play(environment, half, r"\boxed{0.5}") == Outcome(1.0, {"calls": 0})
    assert await play(environment, half, r"\boxed{1/2}") == Outcome(1.0, {"calls": 0})
    assert await play(environment, half, r"\boxed{2}") == Outcome(-1.0, {"calls": 0})
    assert await play(environment, half, "I do not know.") == Outcome(-1.0, {"calls": 0})
    await environment.close()


async def test_wrong_calls_get_words_and_make_a_wrong_answer_less_bad(file: Path, play: Play) -> None:
    environment = PythonTool(str(file), eval_share=0, call_s=1)
    seen: list[str] = []
    replies = script(
        calling(("python", {"source": "1"}), ("bash", {"code": "ls"}), ("python", "code")),
        calling(("python", {"code": "while True: pass"}), ("python", {"code": "print('x' * 9000)"})),
        "I give up.",
    )

    def say(messages: list[dict[str, Any]]) -> object:
        seen.extend(str(one["content"]) for one in messages if one["role"] == "tool" and one["content"] not in seen)
        return replies(messages)

    found = await play(environment, whole_tasks(environment, "train")[0], say)
    assert found == Outcome(-0.9, {"calls": 4})
    assert seen[0] == "Error: the one tool is python, with the text `code`"
    assert seen[1] == "Error: the arguments are no JSON object"
    assert seen[2] == "Error: the run was ended by the limit of time"
    assert len(seen[3]) < 4100


async def test_the_limit_of_steps_ends_an_endless_loop(file: Path, play: Play) -> None:
    environment = PythonTool(str(file), eval_share=0)
    found = await play(
        environment, whole_tasks(environment, "train")[0], lambda _: calling(("python", {"code": "1"})), steps=3
    )
    assert found == Outcome(-0.95, {"calls": 3})

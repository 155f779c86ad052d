"""Tool calls: the loop, the rewards, the process that makes calls, and BFCL over a stand-in of its package."""

import json
import os
import runpy
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_episodes import calling, script

from openclaw_rl.agents.environment import Outcome, load, whole_tasks
from openclaw_rl.agents.environments import bfcl
from openclaw_rl.agents.environments.bfcl import Bfcl
from openclaw_rl.agents.environments.child import Child, ChildGone
from openclaw_rl.agents.environments.tool_loop import tool_reward
from openclaw_rl.errors import EnvironmentFault, SettingsError

Play = Callable[..., Any]


@pytest.mark.parametrize(
    ("calls", "reward"), [(0, -1.0), (1, -1.0), (2, -1.0), (4, -0.9), (9, -0.65), (10, -0.6), (400, -0.6)]
)
def test_a_wrong_answer_after_calls_is_less_bad(calls: int, reward: float) -> None:
    assert tool_reward(calls, right=False) == pytest.approx(reward)
    assert tool_reward(calls, right=True) == 1.0


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(
        "import os, time\n"
        "def answer(asked):\n"
        "    print('a package that prints')\n"
        "    if asked.get('hang'): time.sleep(600)\n"
        "    if asked.get('die'): os._exit(1)\n"
        "    if asked.get('grow'): return {'size': len(bytes(8 << 30))}\n"
        "    return {'environ': dict(os.environ), 'pid': os.getpid()}\n"
    )
    return file


async def test_a_child_has_no_secret_and_answers_again_after_it_died(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENCLAW_RL_AGENTS_KEY", "secret")
    async with Child(program) as child:
        first = await child.ask({}, 60)
        assert set(first["environ"]) <= {"PATH", "LANG", "LC_CTYPE"}
        assert (await child.ask({}, 60))["pid"] == first["pid"]
        for bad in ({"die": True}, {"grow": True}):
            with pytest.raises(ChildGone, match=r"program\.py did not answer"):
                await child.ask(bad, 60)
        with pytest.raises(ChildGone):
            await child.ask({"hang": True}, 0.2)
        last = await child.ask({}, 60)
        assert last["pid"] != first["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(last["pid"], 0)


async def test_a_child_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    with pytest.raises(EnvironmentFault, match=r"broken\.py did not start: .*no_such_package"):
        await Child(tmp_path / "broken.py").ask({}, 60)


PACKAGE = {
    "constants/executable_backend_config.py": """
        CLASS_FILE_PATH_MAPPING = {"GorillaFileSystem": "bfcl_eval.files"}
        STATELESS_CLASSES = []
    """,
    "eval_checker/multi_turn_eval/multi_turn_checker.py": """
        def state_checker(model, right):
            return {"valid": all(model[name].names == right[name].names for name in right)}
        def response_checker(model, right, turn):
            return {"valid": all(one in model for one in right)}
    """,
    "files.py": """
        class GorillaFileSystem:
            def _load_scenario(self, config, long_context=False):
                self.names = sorted(config["names"])
            def touch(self, file_name):
                self.names = sorted([*self.names, file_name])
            def ls(self):
                return {"names": list(self.names)}
            def hang(self):
                while True:
                    pass
    """,
}
DOCS = [
    {"name": name, "description": name, "parameters": {"type": "dict", "properties": properties}}
    for name, properties in (("touch", {"file_name": {"type": "string"}}), ("ls", {}), ("hang", {}))
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in with the package's names: one service, ten tasks of two turns."""
    root = tmp_path / "site" / "bfcl_eval"
    for name, text in PACKAGE.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    for folder in {file.parent for file in root.rglob("*.py")} | {root, root / "eval_checker"}:
        (folder / "__init__.py").touch()
    said = [[{"role": "user", "content": text}] for text in ("Make the file a.", "List.")]
    for category, entry, truth in (
        ("base", {"question": said}, [["touch('a')"], ["ls()"]]),
        ("miss_func", {"question": [*said, []], "missed_function": {"2": ["ls"]}}, [["touch('a')"], [], ["ls()"]]),
    ):
        entries = [
            {
                "id": f"multi_turn_{category}_{number}",
                "involved_classes": ["GorillaFileSystem"],
                "initial_config": {"GorillaFileSystem": {"names": ["z"]}},
                **entry,
            }
            for number in range(10)
        ]
        for folder, rows in (
            ("data", entries),
            ("data/possible_answer", [{"id": one["id"], "ground_truth": truth} for one in entries]),
        ):
            file = root / folder / f"BFCL_v4_multi_turn_{category}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in bfcl._DOCS.values():
        file = root / "data" / "multi_turn_func_doc" / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(one) + "\n" for one in DOCS if name == "gorilla_file_system"))
    world = tmp_path / "world.py"
    world.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(root.parent)!r})\n"
        f"answer = runpy.run_path({str(bfcl._WORLD)!r})['answer']\n"
    )
    monkeypatch.syspath_prepend(root.parent)
    monkeypatch.setattr(bfcl, "_WORLD", world)
    return root


async def test_bfcl_passes_when_every_turn_is_right(package: Path, play: Play) -> None:
    environment = Bfcl()
    task = whole_tasks(environment, "train")[0]
    right = script(calling(("touch", {"file_name": "a"})), "Made.", calling(("ls", {})), "There.")
    assert await play(environment, task, right) == Outcome(1.0, {"calls": 2, "turns": 2})


@pytest.mark.parametrize(
    ("replies", "turns"),
    [
        (("I make no call.",), 0),
        ((calling(("touch", {"file_name": "b"})), "Made."), 0),
        ((calling(("touch", {"name": "a"})), "Made."), 0),
        ((calling(("touch", "{")), "Made."), 0),
        ((calling(("touch", "['a']")), "Made."), 0),
        ((calling(("__import__('os').system", {})), "Made."), 0),
        ((calling(("_load_scenario", {"config": {"names": ["a", "z"]}})), "Made."), 0),
        ((calling(("touch", {"file_name": "a"})), "Made.", "No list."), 1),
    ],
)
async def test_bfcl_fails_at_the_first_wrong_turn(
    replies: tuple[object, ...], turns: int, package: Path, play: Play
) -> None:
    environment = Bfcl()
    found = await play(environment, whole_tasks(environment, "train")[0], script(*replies))
    assert found.reward == -1.0
    assert found.metrics["turns"] == turns


async def test_bfcl_fails_at_a_call_that_hangs(package: Path, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfcl, "_CALL_S", 1.0)
    environment = Bfcl()
    found = await play(environment, whole_tasks(environment, "train")[0], script(calling(("hang", {}))))
    assert found == Outcome(-1.0, {"calls": 1, "turns": 0})


async def test_a_function_of_a_later_turn_comes_with_it(package: Path, play: Play) -> None:
    environment = Bfcl(categories=("miss_func",))
    task = whole_tasks(environment, "train")[0]
    seen: list[str] = []
    replies = iter((calling(("touch", {"file_name": "a"})), "Made.", "I cannot list.", calling(("ls", {})), "Done."))

    def say(messages: list[dict[str, Any]]) -> object:
        seen.append(str(messages[-1]["content"]))
        return next(replies)

    assert (await play(environment, task, say)).reward == 1.0
    assert seen[3].startswith("I have updated some more functions")
    first, missed = environment._tools(environment._entries[str(task.data["id"])])
    assert [one["function"]["name"] for one in first] == ["touch", "hang"]
    assert [one["function"]["name"] for one in missed["2"]] == ["ls"]
    assert first[0]["function"]["parameters"]["type"] == "object"


def test_variants_of_a_task_are_in_one_split(package: Path) -> None:
    environment = Bfcl(categories=("base", "miss_func"), eval_share=0.3)
    held_out = {task.id for task in whole_tasks(environment, "eval")}
    assert len(held_out) == 6
    assert {name.rpartition("_")[2] for name in held_out if "base" in name} == {
        name.rpartition("_")[2] for name in held_out if "miss_func" in name
    }
    assert not held_out & {task.id for task in whole_tasks(environment, "train")}


def test_a_wrong_category_is_named(package: Path) -> None:
    with pytest.raises(SettingsError, match="'memory' is none of base, miss_func"):
        load("bfcl", {"categories": ["memory"]})


def test_without_the_package_the_words_say_what_to_install() -> None:
    with pytest.raises(SettingsError, match=r"bfcl-eval is not installed: scripts/agents/env\.sh"):
        load("bfcl", {})


def test_right_calls_are_read_and_never_evaluated(package: Path) -> None:
    read = runpy.run_path(str(bfcl._WORLD))["answer"].__globals__["read"]
    assert read(" cp('a', target=['b', {'c': 1}]) ") == ("cp", ["a"], {"target": ["b", {"c": 1}]})
    for wrong in ("__import__('os').system('x')", "f(g(1))", "f(*a)", "1", "a.b()"):
        with pytest.raises(ValueError, match=r"no call|malformed"):
            read(wrong)


def test_an_environment_of_another_interpreter_names_what_is_missing() -> None:
    with pytest.raises(SettingsError, match=r"needs a package that this interpreter has not: .*verifiers"):
        load("verifiers", {"taskset": "words"})

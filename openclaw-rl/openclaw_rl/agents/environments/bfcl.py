"""Multi-turn tool calls of the Berkeley Function-Calling Leaderboard: simulated services, a check after each turn.

Needs bfcl-eval (`scripts/agents/env.sh`), which holds the tasks too. The policy gets the task's functions as `tools`.
The services run in a process of their own (`bfcl_world`). An episode ends with the first turn that is not right.
"""

import json
import random
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.environments import tool_loop
from openclaw_rl.agents.environments.child import Child, ChildGone
from openclaw_rl.agents.environments.tool_loop import Call
from openclaw_rl.agents.episode import Episode
from openclaw_rl.errors import EnvironmentFault

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
_WORLD = Path(__file__).with_name("bfcl_world.py")
_CALL_S, _START_S = 20.0, 60.0
_DOCS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "any": "string", "bool": "boolean"}
_MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"


class Bfcl:
    """Tasks of the four multi-turn categories."""

    def __init__(self, categories: Sequence[str] = ("base",), eval_share: float = 0.2, seed: int = 0) -> None:
        """categories: of base, miss_func, miss_param and long_context. eval_share: of the 200 tasks, the held-out ones,
        with their variants in all categories."""
        if wrong := set(categories) - set(CATEGORIES):
            raise ValueError(f"categories: {min(wrong)!r} is none of {', '.join(CATEGORIES)}")
        spec = find_spec("bfcl_eval")
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                "the package bfcl-eval is not installed: scripts/agents/env.sh tools makes its interpreter"
            )
        data = Path(spec.submodule_search_locations[0]) / "data"
        self._entries: dict[str, dict[str, Any]] = {}
        self._truths: dict[str, list[list[str]]] = {}
        for category in categories:
            name = f"BFCL_v4_multi_turn_{category}.json"
            self._entries |= {str(one["id"]): one for one in _lines(data / name)}
            self._truths |= {str(one["id"]): one["ground_truth"] for one in _lines(data / "possible_answer" / name)}
        self._functions = {name: _lines(data / "multi_turn_func_doc" / f"{file}.json") for name, file in _DOCS.items()}
        numbers = sorted({_number(id_) for id_ in self._entries})
        random.Random(f"{seed}:bfcl").shuffle(numbers)
        self._held_out = frozenset(numbers[: round(eval_share * len(numbers))])

    def tasks(self, split: Split) -> Sequence[Task]:
        chosen = [id_ for id_ in self._entries if (_number(id_) in self._held_out) == (split == "eval")]
        kinds = {id_: id_.removeprefix("multi_turn_").rpartition("_")[0] for id_ in chosen}
        return [Task(f"bfcl/{id_}", kind, {"id": id_}) for id_, kind in kinds.items()]

    async def run(self, task: Task, episode: Episode) -> Outcome:
        entry, truth = self._entries[str(task.data["id"])], self._truths[str(task.data["id"])]
        tools, missed = self._tools(entry)
        calls = right = 0
        async with Child(_WORLD) as world:
            names = [one["name"] for name in entry["involved_classes"] for one in self._functions[name]]
            known = [name for name in names if name not in entry.get("excluded_function", ())]
            try:
                await world.ask({"do": "start", "entry": entry, "truth": truth, "functions": known}, _START_S)
            except ChildGone as error:
                raise EnvironmentFault(f"bfcl: the services of {task.id} did not start: {error}") from error

            async def make(call: Call) -> str:
                nonlocal calls
                calls += 1
                asked = {"do": "call", "name": call.name, "arguments": call.arguments}
                return str((await world.ask(asked, _CALL_S))["result"])

            messages: list[dict[str, object]] = []
            try:
                async with episode.acting():
                    for turn, said in enumerate(entry["question"]):
                        if str(turn) in missed:
                            tools += missed[str(turn)]
                            said = said or [{"role": "user", "content": _MORE_FUNCTIONS}]
                        messages += said
                        await tool_loop.tool_loop(episode, messages, tools, make)
                        if not (await world.ask({"do": "end_turn", "turn": turn}, _CALL_S))["valid"]:
                            break
                        right += 1
            except ChildGone:
                pass  # a call of the policy's hung, or took all memory
        passed = right == len(truth)
        metrics = {"calls": float(calls), "turns": float(right)}
        return Outcome(tool_loop.tool_reward(calls, right=passed), metrics)

    def _tools(self, entry: Mapping[str, Any]) -> tuple[list[dict[str, object]], dict[str, list[dict[str, object]]]]:
        """Return the tools of the first turn, and those that come with a later one."""
        excluded = set(entry.get("excluded_function", ()))
        found = {
            one["name"]: tool_loop.tool(one["name"], one["description"], _schema(one["parameters"]))
            for name in entry["involved_classes"]
            for one in self._functions[name]
            if one["name"] not in excluded
        }
        missed = {
            turn: [found.pop(name) for name in names if name in found]
            for turn, names in entry.get("missed_function", {}).items()
        }
        return list(found.values()), missed


def _schema(node: Any) -> Any:
    """Return a JSON schema of the package's, whose types have Python's names."""
    if isinstance(node, list):
        return [_schema(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {name: _schema(value) for name, value in node.items()}
    if isinstance(kind := node.get("type"), str):
        found["type"] = _TYPES.get(kind, kind)
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _number(id_: str) -> int:
    return int(id_.rpartition("_")[2])

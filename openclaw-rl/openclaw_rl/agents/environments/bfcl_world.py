"""The simulated services of one BFCL task: the policy's, and those of the right calls. Runs in a process of `child`.

The package bfcl-eval makes calls by `eval` of the model's text. Here a call is a name, looked up among the documented
functions of the task, and arguments that were parsed as JSON. The right calls are text of the package, read by `ast`.
"""

import ast
import copy
import importlib
import json
from typing import Any

from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, STATELESS_CLASSES
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

_SHOWN_CHARS = 20_000


class _Services:
    """Fresh instances of a task's services."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.instances: dict[str, Any] = {}
        for name in entry["involved_classes"]:
            made = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in STATELESS_CLASSES:
                config = copy.deepcopy(entry["initial_config"].get(name, {}))
                made._load_scenario(config, long_context="long_context" in entry["id"])
            self.instances[name] = made

    def call(self, name: str, places: list[Any], arguments: dict[str, Any]) -> str:
        for instance in self.instances.values():
            method = None if name.startswith("_") else getattr(type(instance), name, None)
            if callable(method):
                try:
                    found = method(instance, *places, **arguments)
                    return found if isinstance(found, str) else _text(found)
                except Exception as error:
                    return f"Error during execution: {error}"
        return f"Error during execution: there is no function {name!r}"


def _text(found: Any) -> str:
    try:
        return json.dumps(found) if isinstance(found, dict) else str(found)
    except (TypeError, ValueError):
        return str(found)


class _World:
    def __init__(self, entry: dict[str, Any], truth: list[list[str]], functions: list[str]) -> None:
        self._policy, self._right = _Services(entry), _Services(entry)
        self._truth, self._functions = truth, frozenset(functions)
        self._results: list[str] = []
        self._calls_of_turn = 0

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        self._calls_of_turn += 1
        if name in self._functions:
            result = self._policy.call(name, [], arguments)
        else:
            result = f"Error during execution: there is no function {name!r}"
        self._results.append(result)
        return result[:_SHOWN_CHARS]

    def end_turn(self, turn: int) -> bool:
        """Make the right calls of the turn, and compare states and results as the package's checker does."""
        truth, called, self._calls_of_turn = self._truth[turn], self._calls_of_turn, 0
        right = [self._right.call(*read(call)) for call in truth]
        if not truth:
            return True
        if not called or not state_checker(self._policy.instances, self._right.instances)["valid"]:
            return False
        return bool(response_checker(self._results, right, turn)["valid"])


def read(call: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return name, positional and named arguments of a call in Python's form, all of them literals."""
    node = ast.parse(call.strip(), mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"no call: {call!r}")
    places = [ast.literal_eval(one) for one in node.args]
    return node.func.id, places, {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}


_worlds: list[_World] = []
"""One: the process is of one episode."""


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    match asked["do"]:
        case "start":
            _worlds.append(_World(asked["entry"], asked["truth"], asked["functions"]))
            return {}
        case "call":
            return {"result": _worlds[0].call(asked["name"], asked["arguments"])}
        case _:
            return {"valid": _worlds[0].end_turn(asked["turn"])}

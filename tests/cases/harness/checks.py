"""The comparisons of a case's `expect.checks`. `at` is a path: names, `[i]`, `[*]`; `.length` and `.count` of lists."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_STEP = re.compile(r"\[(\*|\d+)\]|\.?([^.\[\]]+)")
Op = Callable[[Any, Any], bool]


def failures(checks: Sequence[Mapping[str, Any]], found: Mapping[str, Any], *, said: Mapping[str, Any]) -> list[str]:
    """Return the failed checks, in words. said: predicates of the evidence behind plain-language alternatives."""
    return [problem for check in checks if (problem := _failure(check, found, said)) is not None]


def _failure(check: Mapping[str, Any], found: Mapping[str, Any], said: Mapping[str, Any]) -> str | None:
    at, op, value = check["at"], check["op"], check.get("value")
    if op == "one_of":
        return None if any(said[text](found) for text in value) else f"{at}: none of {value}"
    try:
        actual = _get(found, at)
        wanted = _get(found, value) if op in ("same_as", "endswith", "before") else value
    except (LookupError, TypeError) as error:
        if op not in _ABSENT:
            return f"{at} {op}: nothing there ({error!r})"
        actual, wanted = None, value
    if "[*]" in at and op in _SINGLE:
        holds = bool(actual) and all(_OPS[op](one, wanted) for one in actual)
    else:
        holds = _OPS[op](actual, wanted)
    return None if holds else f"{at} {op} {json.dumps(wanted)[:300]}: {json.dumps(actual, default=str)[:600]}"


def _get(found: Any, path: str) -> Any:
    steps = [(index, name) for index, name in _STEP.findall(path)]
    return _walk(found, steps)


def _walk(value: Any, steps: Sequence[tuple[str, str]]) -> Any:
    if not steps:
        return value
    (index, name), *rest = steps
    if index == "*":
        return [_walk(one, rest) for one in value]
    if index:
        return _walk(value[int(index)], rest)
    if isinstance(value, list):
        if name == "trainable_count":
            return sum(bool(one["trainable"]) for one in value)
        if name in ("length", "count"):
            return len(value)
    return _walk(value[name], rest)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)  # the ledger keeps float32
    return bool(a == b)


def _is_strict_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def _no_cross_pair(samples: Any, pairs: Any) -> bool:
    """Return True if each sample's request and next state are of one of the pairs."""
    return all(any(a in str(one["request_text"]) and b in one["next_state_text"] for a, b in pairs) for one in samples)


_TYPES: Mapping[str, type] = {"string": str, "object": dict, "array": list, "number": float}
_OPS: dict[str, Op] = {
    "eq": _same,
    "same_as": _same,
    "ne": lambda a, b: not _same(a, b),
    "in": lambda a, b: a in b,
    "lt": lambda a, b: a < b,
    "before": lambda a, b: a < b,
    "le": lambda a, b: a is not None and a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "contains": lambda a, b: b in a,
    "not_contains": lambda a, b: b not in a,
    "regex": lambda a, b: re.search(b, a) is not None,
    "is_null": lambda a, _: a is None,
    "not_null": lambda a, _: a is not None,
    "null_or_empty": lambda a, _: not a,
    "len_eq": lambda a, b: len(a) == b,
    "len_ge": lambda a, b: len(a) >= b,
    "type": lambda a, b: isinstance(a, _TYPES[b]),
    "endswith": lambda a, b: a[len(a) - len(b) :] == b,
    "last_is": lambda a, b: bool(a[-1] == b),
    "unique": lambda a, _: len({json.dumps(one) for one in a}) == len(a),
    "finite": lambda a, _: math.isfinite(a),
    "finite_or_absent": lambda a, _: a is None or math.isfinite(a),
    "all_finite": lambda a, _: all(map(math.isfinite, a)),
    "strict_json": lambda a, _: _is_strict_json(a),
    "json_eq": lambda a, b: bool(json.loads(a) == b),
    "all_eq": lambda a, b: bool(a) and all(one == b for one in a),
    "all_in": lambda a, b: bool(a) and all(one in b for one in a),
    "all_le": lambda a, b: bool(a) and all(one <= b for one in a),
    "each_in": lambda a, b: (
        len(a) == len(b)
        and all(one in allowed or (one is not None and "*" in allowed) for one, allowed in zip(a, b, strict=True))
    ),
    "none_contains": lambda a, b: all(b not in one for one in a),
    "none_null": lambda a, _: None not in a,
    "subset_of": lambda a, b: bool(a) and set(a) <= set(b),
    "no_cross_pair": _no_cross_pair,
    "each_once": lambda a, _: bool(a) and set(a.values()) == {1},  # id → how often
    "valid_utf8_jsonl": lambda a, _: all(_is_strict_json(line) for line in a.decode().splitlines()),
    "increased_by": lambda a, b: a[-1] - a[0] == b,  # of what was read before and after
}
_ABSENT = frozenset({"is_null", "null_or_empty", "finite_or_absent"})
"""For these an absent value is null."""
_SINGLE = frozenset({"eq", "ne", "in", "lt", "le", "gt", "ge", "contains", "not_contains", "regex"})
"""With `[*]` these must hold for each item, and for one at least."""

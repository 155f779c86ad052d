"""The load test of many users: a short run over the stub engine, and the count of foreign replies."""

import argparse
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import many_users
from benchmarks.many_users import People


def test_a_short_run_finds_no_foreign_reply_and_no_refusal(tmp_path: Path) -> None:
    options = argparse.Namespace(users=7, at_once=4, loaded=2, minutes=0.03, tokens=6, alone=14, embedded=False, seed=0)
    with ExitStack() as stack:
        found = many_users.measure(tmp_path, options, stack)
    assert found["replies scored"] == found["replies"] > 0
    assert (found["replies under a foreign adapter"], found["refused or cut"]) == (0, [])
    assert found["another's adapter: smallest mean |Δ log-prob|, nats a token"] > 100 * many_users.TOLERANCE["stub"]
    assert found["first token of a cold chat alone, ms"]["n"] > 0
    assert found["memory, MB: first and last quarter"][0]["server"] > 0


@pytest.mark.parametrize(
    ("version", "nats", "count"),
    [(1, 0.0, 0), (2, 0.0, 1), (1, 0.5, 1)],
    ids=["its own", "the version of another", "the weights of another"],
)
def test_a_foreign_reply_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int, nats: float, count: int
) -> None:
    turn = SimpleNamespace(turn_id="t", versions=[SimpleNamespace(weight_version=version)])
    record: Any = SimpleNamespace(turn=turn)
    monkeypatch.setattr(many_users, "_by_user", lambda *_: [("ann", [record])])
    people = People({}, {"ann": 1, "bob": 2}, {"ann": tmp_path / "ann", "bob": tmp_path / "bob"})
    found = many_users.scored(tmp_path, people, {"t"}, lambda _, folder: nats + (folder.name == "bob"), 0.1)
    assert found["replies under a foreign adapter"] == count

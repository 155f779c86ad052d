"""The stage of many users: cold and warm first tokens, findings, and a seed that the local trainer goes on from."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.chat_load import Reply
from gpu import foreign, users_load
from gpu.users_load import Asked
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.learner import STATE_FILE, LearnerState


def asked(turn: str, first_ms: float, *held: str) -> Asked:
    return Asked("ann", frozenset(held), Reply(started=1.0, turn_id=turn, token_times=[1.0 + first_ms / 1000, 3.0]))


def test_a_chat_is_cold_if_the_engine_lacked_its_version() -> None:
    ran = {"warm": 3, "cold": 4, "base": 0}
    every = [asked("warm", 20, "policy-v3"), asked("cold", 90, "policy-v3"), asked("base", 40, "policy-v3")]
    alone = [asked("cold", 60), asked("warm", 30, "policy-v3")]
    found = users_load.first_tokens([asked("one", 10, "policy-v1")], every, alone, ran)
    assert found["first token of their cold chats, ms"] == {"p50": 90.0, "p99": 90.0, "n": 1}
    assert found["first token of their warm chats, ms"] == {"p50": 20.0, "p99": 40.0, "n": 2}
    assert found["first token of a cold chat alone, ms"]["n"] == 1
    assert found["added to one adapter's, ms: warm"] == {"p50": 10.0, "p99": 30.0}


def test_a_seed_is_a_whole_checkpoint_of_the_local_trainer(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "versions" / "lease"
    source.mkdir()
    for name in users_load.FILES:
        (source / name).write_text(name)
    users_load._checkpoint(source, folder, "base")
    checkpoint.verify(folder)
    state = LearnerState.model_validate_json((folder / STATE_FILE).read_bytes())
    assert (state.base_hash, state.optimizer_steps) == ("base", 0)
    assert sorted(file.name for file in folder.iterdir()) == sorted([*users_load.FILES, STATE_FILE, "manifest.json"])


def figures(**more: Any) -> dict[str, Any]:
    return {
        "users": 9,
        "places": 8,
        "first token of their cold chats, ms": {"n": 5},
        "first token of a cold chat alone, ms": {"n": 3},
        "refused or cut": {},
        "trained versions of each user": {"ann": 2, "bob": 1},
        "replies scored": 9,
        "foreign": [],
        "another's adapter: the same, min/p1/p50": [0.5, 0.6, 0.8],
        "problems": [],
        "audit": [],
        **more,
    }


def test_a_run_as_demanded_has_no_findings() -> None:
    assert users_load.findings(figures()) == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"refused or cut": {"503": 2}}, "2 chats were refused or cut"),
        ({"trained versions of each user": {"ann": 2, "bob": 0}}, "bob: no version was trained"),
        ({"foreign": ["t of ann"]}, "foreign: t of ann"),
        ({"first token of their cold chats, ms": {"n": 0}}, "no chat brought its adapter"),
        ({"another's adapter: the same, min/p1/p50": [0, foreign.TOLERANCE, 1]}, "the adapters are too near"),
        ({"audit": ["a sample twice"]}, "audit: "),
        ({"problems": ["trainer: failed"]}, "problems: "),
    ],
)
def test_what_a_run_lacks_is_a_finding(more: dict[str, Any], says: str) -> None:
    (finding,) = users_load.findings(figures(**more))
    assert finding.startswith(says)

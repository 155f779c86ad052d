"""The phases from a batch's last feedback to its version, from hand-written records."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from openclaw_rl.testing.phases import phases


def turn(trained_in: int | None, **times: float) -> dict[str, object]:
    return {"trained_in": trained_in, "events": [{"state": state, "at": at} for state, at in times.items()]}


def published(at: float, weight_version: int) -> str:
    event = {
        "event": "published",
        "weight_version": weight_version,
        "timestamp": datetime.fromtimestamp(at).isoformat(),
    }
    return json.dumps(event | {"load_s": 0.25, "gate_s": 2.0, "self_test_s": 0.5, "switch_s": 1.0})


def test_phases_count_from_the_last_feedback_and_add_up(tmp_path: Path) -> None:
    turns = [
        turn(1, served=1000.0, paired=1001.0, judged=1001.5, sampled=1002.0, leased=1013.0, trained=1033.0),
        turn(1, served=1003.0, paired=1010.0, judged=1011.0, sampled=1012.0, leased=1013.0, trained=1033.0),
        turn(2, served=1003.0, paired=1090.0, judged=1091.0, sampled=1092.0, leased=1093.0, trained=1100.0),
        turn(None, served=1020.0, paired=1080.0),
    ]
    log = tmp_path / "server.log"
    log.write_text("\n".join(["not JSON", published(1101.0, 2), published(1037.0, 1)]))
    found = phases(turns, log, 1, {"learner_s": 19.0})
    assert found.pop("total") == 27.0
    assert found == {
        "judge and score": 2.0,
        "lease wait": 1.0,
        "step": 19.0,
        "checkpoint and commit": 1.0,
        "load": 0.25,
        "gate": 2.0,
        "self-test": 0.5,
        "switch": 1.0,
        "publisher's own": 0.25,
    }
    assert sum(found.values()) == 27.0


def test_a_version_that_was_not_published_is_named(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(published(1037.0, 2))
    with pytest.raises(LookupError, match="version 1 was published"):
        phases([turn(1, paired=1.0, leased=1.0, trained=1.0, sampled=1.0)], tmp_path / "server.log", 1, {})

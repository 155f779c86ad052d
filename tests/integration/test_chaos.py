"""Three minutes of chaos: two servers, two engines, people who know the truth; nothing lost, trained twice or wrongly
paired, and nobody unanswered while the server was there. `scripts/chaos.py` is the same for half an hour.

The run starts when the tests have been collected and goes on beside them (`conftest.py`); this test is the last and
waits for what is left of it. Counts are asserted, times never.
"""

import json
from typing import Any

import pytest
from beside import Beside

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def summary(chaos_run: Beside) -> dict[str, Any]:
    done = chaos_run.wait(800)
    assert done.stdout.startswith("{"), done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_nothing_is_lost_and_nobody_is_left_without_an_answer(summary: dict[str, Any]) -> None:
    seed = summary["conditions"]["seed"]
    assert summary["findings"] == [], f"seed {seed}"
    zeros = ("turns_lost", "trained_twice", "wrong_pairs", "not_answered_without_cause")
    assert {name: summary[name] for name in zeros} == dict.fromkeys(zeros, 0), f"seed {seed}"


def test_it_was_about_something(summary: dict[str, Any]) -> None:
    stub, embedded = summary["stub"], summary["embedded"]
    assert set(stub["kills"]) == {"engine", "judge", "server", "trainer"}
    assert set(embedded["kills"]) == {"engine", "server", "trainer"}
    assert stub["pairs_checked"] > 100
    assert stub["counters"]["trained"] > 50
    assert stub["replayed_versions"] > 3
    assert embedded["pairs_checked"] > 0
    assert set(summary["faults"]["engine"]) >= {"5xx", "reset", "slow"}


def test_faults_cost_no_line_a_request(summary: dict[str, Any]) -> None:
    """What happened to hundreds of requests is told a few times."""
    lines, kills = summary["log_lines"], summary["stub"]["kills"]
    outages = sum(kills.values()) + 1
    for event in ("part_fails", "part_works_again", "engine_down", "engine_ready", "judge_out"):
        assert lines.get(event, 0) <= 4 * outages, (event, lines)
    assert not {"engine_cut", "request_not_recorded", "turn_not_trainable", "publish_delayed"} & set(lines)

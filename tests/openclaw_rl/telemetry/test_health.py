"""Counters and means beside the ledger, as operators read them."""

import pytest
import structlog
from structlog.testing import capture_logs

from openclaw_rl.telemetry import health as meters_module
from openclaw_rl.telemetry import metrics
from openclaw_rl.telemetry.health import Health


def test_meters_are_rendered_beside_the_ledgers_counts() -> None:
    health = Health()
    health.count("hindsight_scored")
    health.count("hindsight_scored")
    for value in (0.5, 1.0):
        health.observe("gap_abs", value)
    text = metrics.render({"trained": 3}, 7, health)
    assert 'openclaw_rl_ledger{what="trained"} 3\n' in text
    assert 'openclaw_rl_scoring{what="hindsight_scored"} 2\n' in text
    assert 'openclaw_rl_scoring_mean{what="gap_abs"} 0.75\n' in text
    assert text.endswith("\n")


def test_a_part_is_a_problem_after_some_failures_in_a_row() -> None:
    health = Health()
    for n in range(5):
        health.failed("teacher", f"error {n}")
        assert bool(health.problems()) == (n >= 2)
        if n == 2:
            assert health.problems() == ["teacher: failed 3 times in a row, last: error 2"]
    health.ok("teacher")
    health.failed("teacher", "again")
    assert health.problems() == []


def test_a_part_may_be_out_of_order_by_one_failure() -> None:
    health = Health()
    health.failed("checkpoints", "disk full", at_once=True)
    assert health.problems() == ["checkpoints: failed once: disk full"]
    health.failed("checkpoints", "still full", at_once=True)
    assert health.problems() == ["checkpoints: failed 2 times in a row, last: still full"]
    health.ok("checkpoints")
    assert health.problems() == []


def test_a_part_that_fails_a_thousand_times_is_two_lines_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    structlog.reset_defaults()
    monkeypatch.setattr(meters_module, "log", structlog.get_logger())  # without the level that another test set
    health = Health()
    with capture_logs() as lines:
        for n in range(1000):
            health.failed("engine", f"error {n}")
        health.ok("engine")
        health.ok("engine")
        health.failed("engine", "once: a retry mends it")
        health.ok("engine")
    assert [(line["event"], line["part"]) for line in lines] == [
        ("part_fails", "engine"),
        ("part_works_again", "engine"),
    ]
    assert lines[1]["failures"] == 1000
    assert health.failures == {"engine": 1001}


def test_metrics_name_the_parts_that_are_out_of_order() -> None:
    health = Health()
    for _ in range(3):
        health.failed("judge", "down")
    text = metrics.render({}, 0, health, ["judge: failed 3 times", "ledger: disk full"])
    assert 'openclaw_rl_out_of_order{part="judge"} 1\n' in text
    assert 'openclaw_rl_out_of_order{part="ledger"} 1\n' in text
    assert 'openclaw_rl_failures_total{part="judge"} 3\n' in text

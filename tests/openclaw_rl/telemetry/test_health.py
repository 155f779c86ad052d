"""Parts that fail and work again, and the durations of the work, as `Health` counts them."""

import pytest
import structlog
from structlog.testing import capture_logs

from openclaw_rl.telemetry import health as health_module
from openclaw_rl.telemetry.health import FIRST_TOKENS, Durations, Health


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


def test_the_words_of_a_failure_can_be_shown_whatever_they_are() -> None:
    health = Health()
    health.failed("judge", "\ud800 no " + "x" * 100_000, at_once=True)
    (problem,) = health.problems()
    assert problem.startswith("judge: ")
    assert "\ufffd no" in problem
    assert len(problem.encode()) < 3000


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
    monkeypatch.setattr(health_module, "log", structlog.get_logger())  # without the level that another test set
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


def test_a_duration_counts_in_every_bucket_that_holds_it() -> None:
    durations = Durations((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):  # a bound belongs to its bucket
        durations.observe(seconds)
    assert durations.cumulative() == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert durations.total_s == pytest.approx(7.65)


def test_the_newest_times_to_a_first_token_are_kept_with_their_version() -> None:
    health = Health()
    for n in range(FIRST_TOKENS + 5):
        health.first_token_came(float(n), 3, 0.2)
    assert len(health.first_tokens) == FIRST_TOKENS
    assert health.first_tokens[-1] == (FIRST_TOKENS + 4.0, 3, 0.2)
    assert health.first_token.total_s == pytest.approx(0.2 * (FIRST_TOKENS + 5))

"""Counters and means beside the ledger, as operators read them."""

from openclaw_rl import metrics
from openclaw_rl.meters import Meters


def test_meters_are_rendered_beside_the_ledgers_counts() -> None:
    meters = Meters()
    meters.count("hindsight_scored")
    meters.count("hindsight_scored")
    for value in (0.5, 1.0):
        meters.observe("gap_abs", value)
    text = metrics.render({"trained": 3}, 7, meters)
    assert 'openclaw_rl_ledger{what="trained"} 3\n' in text
    assert 'openclaw_rl_scoring{what="hindsight_scored"} 2\n' in text
    assert 'openclaw_rl_scoring_mean{what="gap_abs"} 0.75\n' in text
    assert text.endswith("\n")


def test_a_part_is_a_problem_after_some_failures_in_a_row() -> None:
    meters = Meters()
    for n in range(5):
        meters.failed("teacher", f"error {n}")
        assert bool(meters.problems()) == (n >= 2)
        if n == 2:
            assert meters.problems() == ["teacher: failed 3 times in a row, last: error 2"]
    meters.worked("teacher")
    meters.failed("teacher", "again")
    assert meters.problems() == []

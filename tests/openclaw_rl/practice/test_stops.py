"""A wish rests when it is learned, had its updates or makes no progress; it is stopped when its replies go too far."""

import pytest

from openclaw_rl.practice.stops import LEARNED, Ruling, rule
from openclaw_rl.settings import PracticeSettings

SETTINGS = PracticeSettings(max_updates=10, patience=3, max_kl=1.0)


def ruling(wish, share=0.5, kl=0.2, history=(), *, aim=1.3, passed=None, **more):
    return rule(wish(1, 0, **more), share, kl, list(history) or [share], SETTINGS, aim=aim, passed=passed)


def test_practice_goes_on_below_the_aim(wish):
    assert ruling(wish, 1.29, updates=9) == Ruling()
    assert ruling(wish, None, None) == Ruling()


def test_a_wish_is_learned_at_the_aim_and_stays_so_until_it_falls_well_below(wish):
    assert ruling(wish, 1.3) == Ruling(rests=LEARNED)
    assert ruling(wish, 1.2, rests=LEARNED) == Ruling(rests=LEARNED)
    assert ruling(wish, 1.1, rests=LEARNED) == Ruling()


def test_what_the_judge_passes_holds_a_wish_open_that_its_share_would_end(wish):
    """The share of *lively* reached the aim while the judge passed one reply in eight."""
    assert ruling(wish, 1.9, passed=0.125) == Ruling()
    assert ruling(wish, 1.9, passed=0.75) == Ruling(rests=LEARNED)
    assert ruling(wish, 1.2, passed=1.0) == Ruling()
    assert ruling(wish, 1.9, passed=0.65, rests=LEARNED) == Ruling(rests=LEARNED)
    assert ruling(wish, 1.9, passed=0.5, rests=LEARNED) == Ruling()


def test_a_wish_that_went_too_far_from_the_base_is_stopped_even_if_it_is_learned(wish):
    found = ruling(wish, 2.0, 1.01, rests=LEARNED)
    assert found.stopped == "its replies are 1.01 nats a token from the base (practice.max_kl)"
    assert ruling(wish, 0.5, 1.0) == Ruling()


def test_a_wish_that_had_its_updates_rests_and_goes_on_resting(wish):
    rests = "it had 10 updates (practice.max_updates)"
    assert ruling(wish, 0.9, updates=10) == Ruling(rests=rests)
    assert ruling(wish, 0.9, updates=3, rests=rests) == Ruling(rests=rests)


@pytest.mark.parametrize(
    ("history", "rests"),
    [
        ([0.1, 0.5, 0.5, 0.55, 0.5], True),  # a rise by 0.04 of the aim, 1.3, is progress
        ([0.1, 0.5, 0.5, 0.56, 0.5], False),
        ([0.5, 0.5, 0.5], False),  # too early to say
        ([0.5, 0.2, 0.2, 0.2], True),
    ],
)
def test_a_wish_without_progress_rests(wish, history, rests):
    assert ruling(wish, history[-1], history=history).rests == (
        "no progress in 3 updates (practice.patience)" if rests else None
    )

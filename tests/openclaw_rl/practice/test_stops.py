"""A wish rests when it is learned, had its updates or makes no progress; it is stopped when its replies go too far."""

import pytest

from openclaw_rl.practice.stops import LEARNED, Ruling, no_progress, rule
from openclaw_rl.settings import PracticeSettings

SETTINGS = PracticeSettings(max_updates=10, patience=3, max_kl=1.0)


def ruling(wish, share=0.5, kl=0.2, *, aim=1.3, stalls=False, passed=None, **more):
    return rule(wish(1, 0, **more), share, kl, SETTINGS, aim=aim, stalls=stalls, passed=passed)


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


def test_a_wish_without_progress_rests_unless_it_is_learned(wish):
    assert ruling(wish, stalls=True) == Ruling(rests="no progress in 3 updates (practice.patience)")
    assert ruling(wish, 1.3, stalls=True) == Ruling(rests=LEARNED)


@pytest.mark.parametrize(
    ("histories", "stalls"),
    [
        ([[0.1, 0.5, 0.5, 0.53, 0.5]], True),  # a rise by 3 x 0.01 of the aim, 1.3, is progress
        ([[0.1, 0.5, 0.5, 0.54, 0.5]], False),
        ([[0.5, 0.5, 0.5]], False),  # too early to say
        ([[0.5, 0.2, 0.2, 0.2]], True),
        ([[0.5, 0.5, 0.5, 0.5], [0.2, 0.3, 0.4, 0.5]], False),  # the one that rises keeps both open
        ([[0.9, 0.8, 0.7, 0.6], [0.2, 0.3, 0.4, 0.5]], True),  # the one is unlearned as fast as the other is learned
        ([[0.0, 0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], False),  # a new wish has a time of its own
        ([[0.0, 0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]], True),
        ([], False),
    ],
)
def test_progress_is_of_all_open_wishes_together(histories, stalls):
    assert no_progress(histories, SETTINGS, aim=1.3) is stalls

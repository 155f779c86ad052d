"""Backoff: pauses double up to the limit and start again after a success."""

import pytest

from openclaw_rl.backoff import Backoff


def test_pauses_double_up_to_the_limit():
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_success_starts_again_at_the_first_pause():
    backoff = Backoff(1.0, 8.0)
    backoff.next_s(), backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 1.0


@pytest.mark.parametrize(("first_s", "longest_s"), [(0.0, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_a_limit_below_the_first_pause_is_refused(first_s: float, longest_s: float):
    with pytest.raises(ValueError, match="backoff"):
        Backoff(first_s, longest_s)

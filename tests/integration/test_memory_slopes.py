"""How the chaos run reads memory, on curves of which the slope is known."""

import math

import pytest
from chaos.memory import late, pooled

LEVELLING = [(60.0 * minute, 300 + 20 * (1 - math.exp(-minute / 3))) for minute in range(21)]
GROWING = [(60.0 * minute, 300 + 0.7 * minute) for minute in range(21)]


def test_lives_share_a_slope_and_not_a_level() -> None:
    restarted = [(2000 + at, mb - 50) for at, mb in GROWING]
    slope = pooled([GROWING, restarted], warm_up_s=120)
    assert (slope.mb_per_minute, slope.lives, slope.minutes) == (pytest.approx(0.7), 2, 36.0)


def test_a_curve_that_flattens_is_told_from_one_that_grows() -> None:
    short = LEVELLING[:5]
    assert late([short, LEVELLING]).mb_per_minute == pytest.approx(0.06, abs=0.03)
    assert late([short, GROWING]).mb_per_minute == pytest.approx(0.7)
    assert late([LEVELLING]).minutes == 10.0


def test_too_little_says_nothing() -> None:
    assert pooled([GROWING[:4]], warm_up_s=120).mb_per_minute is None

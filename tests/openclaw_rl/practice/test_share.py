"""The learned share, by hand: a projection that is 0 at the base, 1 at the hinted base, 1 + w at a guided teacher."""

import math

import pytest

from openclaw_rl.practice.share import Forced, learned_share, mean_kl, moved_once

BASE, HINTED = (-1.0, -2.0, -3.0), (-0.5, -2.5, -3.0)  # the wish moves the tokens by +0.5, -0.5 and 0


def at(w: float) -> Forced:
    """A policy that stands where guidance `w` would put it."""
    policy = tuple(b + w * (h - b) for b, h in zip(BASE, HINTED, strict=True))
    return Forced(policy, BASE, HINTED)


@pytest.mark.parametrize("w", [0.0, 0.5, 1.0, 2.0, -1.0])
def test_it_is_the_place_on_the_way_from_the_base_to_the_hinted_base(w):
    assert learned_share([at(w)]) == pytest.approx(w, abs=1e-12)


def test_what_moves_across_the_wish_does_not_count():
    across = Forced((-0.5, -1.5, -9.0), BASE, HINTED)  # +0.5 and +0.5: across; the third token: not the wish's
    assert learned_share([across]) == pytest.approx(0.0, abs=1e-12)


def test_tokens_count_by_the_square_of_what_the_wish_moves_in_them():
    # (0.2 · 1 + 1.5 · 3) / (1 + 9) = 4.7 / 10
    assert learned_share([Forced((0.2, 1.5), (0.0, 0.0), (1.0, 3.0))]) == pytest.approx(0.47)
    parts = [Forced((0.2,), (0.0,), (1.0,)), Forced((1.5,), (0.0,), (3.0,))]
    assert learned_share(parts) == pytest.approx(0.47)


@pytest.mark.parametrize(
    "texts",
    [[], [Forced(BASE, BASE, BASE)], [Forced((math.nan,), (0.0,), (1.0,))], [Forced((0.0,), (0.0,), (-math.inf,))]],
)
def test_without_an_effect_or_with_broken_numbers_there_is_no_share(texts):
    assert learned_share(texts) is None


def test_the_kl_is_the_mean_over_all_tokens():
    # (0.5 + 0 + 1.0) / 3
    assert mean_kl([((-1.0, -1.0), (-1.5, -1.0)), ((-1.0,), (-2.0,))]) == pytest.approx(0.5)
    assert mean_kl([]) is None
    assert mean_kl([((-1.0,), (-math.inf,))]) is None


def test_against_neutral_words_the_guided_teacher_still_stands_at_1_plus_w():
    neutral, w = (-0.75, -2.25, -3.5), 2.0
    teacher = tuple(h + w * (h - n) for h, n in zip(HINTED, neutral, strict=True))  # by its definition
    once = moved_once(BASE, HINTED, neutral, w)
    assert learned_share([Forced(teacher, BASE, once)]) == pytest.approx(1 + w)
    # -1 + (0.5 + 2 · 0.25) / 3, -2 + (-0.5 - 2 · 0.25) / 3, -3 + (0 + 2 · 0.5) / 3
    assert once == pytest.approx((-2 / 3, -7 / 3, -8 / 3))


@pytest.mark.parametrize("w", [0.0, 1.0, 3.0])
def test_against_nothing_it_is_the_hinted_base(w):
    assert moved_once(BASE, HINTED, BASE, w) == pytest.approx(HINTED)

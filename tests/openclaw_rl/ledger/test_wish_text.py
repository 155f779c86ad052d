"""Wishes are compared by their words: equal ones are one, opposite ones exclude each other, others stand together."""

import pytest

from openclaw_rl.ledger.wish_text import key_of, opposed


@pytest.mark.parametrize(
    ("one", "other"),
    [("Shorter, please!", "please — shorter"), ("No lists", "no  LISTS."), ("Don’t use emojis", "don't use emojis")],
)
def test_equal_wishes_have_one_key(one, other):
    assert key_of(one) == key_of(other) != ""


def test_a_text_without_words_has_no_key():
    assert key_of(" …! ") == ""
    assert key_of("please") == "please"


@pytest.mark.parametrize(
    ("one", "other", "axis"),
    [
        ("shorter please", "give me more detail", "length"),
        ("that was too long", "too short", "length"),
        ("not so long", "longer, please", "length"),
        ("no bullet points please", "use bullet points", "lists"),
        ("a bit less formal", "more formal please", "formality"),
        ("no emojis", "add some emojis", "emoji"),
        ("Please don't give me a list.", "Give me a list.", "lists"),
    ],
)
def test_opposite_ends_of_an_axis_exclude_each_other(one, other, axis):
    assert opposed(one, other) == opposed(other, one) == axis


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("shorter please", "no lists"),
        ("less formal", "that is too formal"),
        ("too long", "be brief"),
        ("shorter, but not too short", "longer"),  # it names both ends: not for a table to decide
        ("it no longer works", "be brief"),
        ("Please don't give me a list. Just two short sentences.", "No list please, I want two short sentences."),
        ("don't use so many emojis", "no emojis"),
    ],
)
def test_other_wishes_stand_together(one, other):
    assert opposed(one, other) is None

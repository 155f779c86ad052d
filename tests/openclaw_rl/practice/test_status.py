"""One line tells people what practice does, and why it does not."""

import pytest

from openclaw_rl.practice.status import PracticeStatus


def test_a_line_while_it_practises_waits_and_rests(wish):
    wishes = [wish(1, updates=4, learned_share=0.78), wish(2, updates=2, learned_share=0.78, rests="learned")]
    status = PracticeStatus.of(wishes, aim=1.3)
    assert status.line() == "practising 2 wishes, update 5, learned 60 %"
    assert status.waiting("a chat runs").line() == "practising 2 wishes, update 5, learned 60 % (a chat runs)"
    assert status.figures() == {"wishes": 2, "open": 1, "update": 5, "learned": pytest.approx(0.6)}
    assert status.fields() == {"wishes": 2, "update": 5, "learned": "60 %"}
    rested = PracticeStatus.of(wishes[1:], aim=1.3, waits="all wishes are learned, or rest")
    assert rested.line() == "practice: 1 wish, learned 60 %; all wishes are learned, or rest"


def test_a_share_beyond_the_aim_is_all_of_it_and_one_below_the_base_is_none(wish):
    assert PracticeStatus.of([wish(1, learned_share=2.0)], aim=1.3).learned == 1.0
    assert PracticeStatus.of([wish(1, learned_share=-0.5)], aim=1.3).learned == 0.0


def test_without_a_wish_or_a_measure_no_share_is_invented(wish):
    assert PracticeStatus.of([], aim=1.3, waits="there is no wish").line() == "practice: there is no wish"
    assert PracticeStatus.of([wish(1)], aim=1.3).line() == "practising 1 wish, update 1"
    assert "learned" not in PracticeStatus.of([wish(1)], aim=1.3).figures()

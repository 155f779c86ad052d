"""Judges read texts: a mark stands in the place of a picture, and tells whether two pictures are the same."""

from dataclasses import replace

import pytest

from openclaw_rl.judge.prompt import judge_prompt
from openclaw_rl.judge.steps import rule_on_step, step_prompt
from openclaw_rl.messages import Message
from openclaw_rl.types import NextState, PastStep, StepContext
from openclaw_rl.types.pictures import Picture, words_of

BEFORE, AFTER = Picture("a1" * 32, 640, 480), Picture("b2" * 32, 640, 480)


def shown(*parts: str | Picture, role: str = "user") -> Message:
    content = [{"type": "text", "text": one} if isinstance(one, str) else one.part().model_dump() for one in parts]
    return Message.model_validate({"role": role, "content": content})


def test_a_mark_stands_in_the_place_of_a_picture() -> None:
    assert words_of(shown("look:", BEFORE, "well?")) == "look:\n[picture a1a1a1a1, 640 x 480]\nwell?"
    assert words_of(Message(role="user", content="plain")) == "plain"
    assert words_of(Message(role="assistant", content=None)) == ""


def test_the_prompt_of_a_judge_has_the_marks(judged) -> None:
    turn = judged([shown("what is it?", BEFORE)], "A cat.", shown("no, this one", AFTER))
    prompt = judge_prompt(turn)[1].content
    assert "| [picture a1a1a1a1, 640 x 480]" in prompt
    assert "| [picture b2b2b2b2, 640 x 480]" in prompt
    step = replace(turn, episode=StepContext("Buy it.", (PastStep(turn.turn.reply, (shown(BEFORE),)),)))
    assert "| [picture a1a1a1a1, 640 x 480]" in step_prompt(step)[1].content


def test_a_step_with_another_picture_had_an_effect(judged) -> None:
    turn = judged("go", "click('Buy')", shown(AFTER))
    again = replace(turn, episode=StepContext("Buy it.", (PastStep(turn.turn.reply, (shown(BEFORE),)),)))
    assert rule_on_step(again).value == 0
    same = replace(again, next_state=NextState((shown(BEFORE),)))
    assert rule_on_step(same).rule.startswith("without effect")


@pytest.mark.parametrize("size", [(404, 500), (500, 404), (1, 0), (127, 1)])
def test_the_size_of_a_picture_is_no_fault(judged, size) -> None:
    turn = judged("go", "click('Buy')", shown(Picture("e4" * 32, *size)))
    assert rule_on_step(turn).value == 0

"""The product's judge understands the simulated people, whose rules can fail."""

from collections.abc import Iterator

import pytest

from openclaw_opd.hints import find_hints
from openclaw_opd.settings import OpdSettings
from openclaw_rl.judge.rules import rule_on
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import ScoringTools
from openclaw_rl.offline.personas import NO_LISTS, PREFERENCES, SHORT, THANKS, Preference, Topic, is_about, topics
from openclaw_rl.types import JudgedTurn, NextState, Request, SamplingParams, Scope, Turn, Verdict, VersionRun

EGG = Topic("boil an egg", ("egg", "boil"))


def complaints() -> Iterator[tuple[Preference, str]]:
    for preference in PREFERENCES.values():
        for complaint in preference.complaints:
            for said in complaint.said:
                yield preference, said


def told(preference: Preference, said: str) -> JudgedTurn:
    request = Request(
        request_id="r",
        scope=Scope("user", "s"),
        received_at=0.0,
        messages=(Message(role="user", content=preference.question(EGG)),),
        tools_json=None,
        template_kwargs_json=None,
        prompt_ids=(1,),
        sampling=SamplingParams(8),
    )
    reply = Message(role="assistant", content="Eggs are a very nice thing to eat.")
    turn = Turn("t", "r", 0.0, (1,), (-1.0,), (True,), (VersionRun(0, 1),), "stop", reply)
    return JudgedTurn(request, turn, NextState((Message(role="user", content=said),)), Verdict(-1, (-1,), "rules"))


@pytest.mark.parametrize(("preference", "said"), list(complaints()))
async def test_a_complaint_is_a_correction_and_a_hint(preference: Preference, said: str) -> None:
    judged = told(preference, said)
    assert rule_on(judged).value == -1
    found = await find_hints(judged, ScoringTools(settings=OpdSettings(hint_source="verbatim")))
    assert found.hints == (said,)


@pytest.mark.parametrize("said", THANKS)
def test_thanks_are_praise(said: str) -> None:
    assert rule_on(told(SHORT, said)).value == 1


@pytest.mark.parametrize(
    ("reply", "ended", "complaint"),
    [
        ("Boil the egg for eight minutes, then cool it in cold water.", True, None),
        ("Boil the egg for eight minutes, then", False, "too_long"),
        ("Boil the egg. " * 14, True, "too_long"),
        ("1. Take an egg.\n2. Boil it.", True, "has_list"),
        ("Take these steps: 1. Take an egg. 2. Boil it.", True, "has_list"),
        ("**Boil** the egg.", True, "has_list"),
        ("Egg.", True, "off_topic"),
        ("Here is how to boil eggs in two short sentences.", True, "off_topic"),
        ("Please answer my question in one egg.", True, "off_topic"),
        ("The old man had a pen and a notebook.", True, None),
    ],
)
def test_short_rules(reply: str, ended: bool, complaint: str | None) -> None:
    found = SHORT.complaint(EGG, reply, has_ended=ended, reads_request=False)
    assert (found.name if found else None) == complaint
    assert SHORT.is_met(EGG, reply, has_ended=ended) == (complaint is None)


def test_a_user_who_reads_the_request_notices_what_is_about_something_else() -> None:
    reply = "The old man had a pen and a notebook."
    assert not is_about(EGG, reply)
    found = SHORT.complaint(EGG, reply, has_ended=True, reads_request=True)
    assert found is SHORT.off_topic


@pytest.mark.parametrize(
    ("reply", "is_met"),
    [
        ("Cover the egg with cold water, bring it to a boil, and let it rest for eight minutes.", True),
        ("Cover the egg with cold water and bring it to a boil, then let it rest for", True),
        ("- Cover the egg\n- Boil it", False),
        ("Here are no lists, but some eggs that you may want to cook one day.", False),
        ("Boil it.", False),
    ],
)
def test_no_list_rules(reply: str, is_met: bool) -> None:
    assert NO_LISTS.is_met(EGG, reply, has_ended=False) == is_met


def test_held_out_topics_are_not_trained_on() -> None:
    train, held_out = topics("train"), topics("held_out")
    assert not {t.text for t in train} & {t.text for t in held_out}
    assert len(train) >= 48
    assert len(held_out) >= 40
    for topic in (*train, *held_out):
        assert topic.about, topic.text
        assert any(is_about(topic, form) for form in (topic.text,)), topic.text

"""The guided teacher against the fake engine: its passes, its numbers, and what a failure costs."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from teacher_scorer import FAILURES, SHORT, Scorer

from openclaw_opd import teacher
from openclaw_opd.method import Absent, hindsight
from openclaw_opd.teacher import NOISE_SHARE
from openclaw_rl.engines.base import Score
from openclaw_rl.types import HintTerm, Ids


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "FIRST_PAUSE_S", 1e-6)


class GuidedScorer(Scorer):
    """The base gives -1 and, with the hint, -0.5; the policy gives -2. Tables are of two ids; see `table`."""

    asked: tuple[Ids, ...] = ()

    async def score(self, prompt_ids: Ids, response_ids: Ids, **how: Any) -> Score:
        await super().score(prompt_ids, response_ids, **how)
        is_hinted = SHORT in "".join(map(chr, prompt_ids))
        value = -2.0 if how["lora_path"] is not None else -0.5 if is_hinted else -1.0
        n = len(response_ids)
        if not how.get("top_k"):
            return Score((value,) * n)
        assert is_hinted, "no table of the base without the hint"
        return Score((value,) * n, ((math.log(0.4), math.log(0.4)),) * n, ((7, 9),) * n)

    async def score_ids(self, prompt_ids: Ids, response_ids: Ids, ids: Any, **how: Any) -> Score:
        self.asked = tuple(ids)
        scored = await self.score(prompt_ids, response_ids, **how)
        # In another order than the teacher's table, and with another hint's id.
        return Score(scored.log_probs, ((-9.0, math.log(0.5), math.log(0.2)),) * len(ids), ((8, 9, 7),) * len(ids))


async def test_a_guided_teacher_moves_on_by_the_effect_of_the_hint(bench, judged) -> None:
    b = bench(engine=(engine := GuidedScorer()), hint_source="verbatim", teacher="base", guidance=1.5)
    b.serving.switch(7, "policy-v7")
    term = await hindsight(judged("hi", "a", SHORT, mask=(True, False, True)), b.tools)
    # -0.5 + 1.5 · (-0.5 + 1); the student's side stays the policy's own.
    assert (term.teacher_log_probs, term.student_log_probs, term.scored_version) == ((0.25,) * 3, (-2.0,) * 3, 7)
    assert [(SHORT in call[0], *call[2:]) for call in engine.seen] == [
        (False, "policy-v7", "v7", 0),
        (True, None, "v0", 0),
        (False, None, "v0", 0),
    ]
    assert {name: mean.value for name, mean in b.tools.health.means.items()} == {
        "hint_gain": -2.0,  # 2.25, clipped as in the loss
        "gap_abs": 1.5,
        "guided_gap_abs": 2.25,
    }
    kept = HintTerm.of_json(term.term().to_json())
    assert (kept.guidance, kept.hinted_gap, kept.gain) == (1.5, 1.5, -2.0)


async def test_the_effect_of_a_hint_can_be_taken_against_neutral_words(bench, judged) -> None:
    neutral = "Thank you."

    class Aside(GuidedScorer):
        async def score(self, prompt_ids: Ids, response_ids: Ids, **how: Any) -> Score:
            score = await super().score(prompt_ids, response_ids, **how)
            is_aside = neutral in "".join(map(chr, prompt_ids))
            return replace(score, log_probs=(-0.75,) * len(response_ids)) if is_aside else score

    b = bench(engine=(engine := Aside()), hint_source="verbatim", teacher="base", guidance=2.0, neutral_hint=neutral)
    turn = judged("hi", "a", SHORT)
    term = await hindsight(turn, b.tools)
    # -0.5 + 2 · (-0.5 + 0.75), also while the policy is the base: its own pass is of another prompt.
    assert (term.teacher_log_probs, term.student_log_probs) == ((0.0,) * 3, (-1.0,) * 3)
    plain, told, aside = (text for text, *_ in engine.seen)
    assert aside == told.replace(SHORT, neutral) != plain
    b = bench(engine=(engine := Aside()), hint_source="verbatim", teacher="base", guidance=0, neutral_hint=neutral)
    term = await hindsight(turn, b.tools)
    assert (term.teacher_log_probs, len(engine.seen)) == ((-0.5,) * 3, 2), "no guidance, no such pass"


async def test_the_request_s_own_effect_is_taken_against_a_neutral_request(bench, judged) -> None:
    """The base gives -1 to the request with neutral words, and -3 to a neutral request with them."""
    engine = GuidedScorer()
    plain_score = engine.score

    async def score(prompt_ids: Ids, response_ids: Ids, **how: Any) -> Score:
        found = await plain_score(prompt_ids, response_ids, **how)
        is_away = "Tell me about it." in "".join(map(chr, prompt_ids))
        return replace(found, log_probs=(-3.0,) * len(response_ids)) if is_away else found

    engine.score = score  # type: ignore[method-assign]
    guided = {"teacher": "base", "guidance": 2.0, "neutral_hint": "Thank you.", "request_guidance": 0.25}
    b = bench(engine=engine, hint_source="verbatim", **guided)
    b.serving.switch(7, "policy-v7")
    term = await hindsight(judged("hi", "a", SHORT), b.tools)
    # -0.5 + 2 · (-0.5 + 1) + 0.25 · (-1 + 3)
    assert term.teacher_log_probs == (1.0,) * 3
    _, told, aside, away = (text for text, *_ in engine.seen)
    assert aside == told.replace(SHORT, "Thank you.")
    assert away == aside.replace("hi", "Tell me about it.")
    engine.seen.clear()
    b = bench(engine=engine, hint_source="verbatim", **guided | {"guidance": 0})
    term = await hindsight(judged("hi", "a", SHORT), b.tools)
    assert (term.teacher_log_probs, len(engine.seen)) == ((-0.5,) * 3, 2), "without guidance no such pass"


async def test_a_neutral_request_that_overflows_the_context_is_said_and_not_scored(bench, judged) -> None:
    guided = {"teacher": "base", "guidance": 2.0, "request_guidance": 0.25, "neutral_request": "Tell me. " * 40}
    b = bench(engine=(engine := GuidedScorer()), hint_source="verbatim", **guided)
    tools = replace(b.tools, context_length=200)
    term = await hindsight(judged("hi", "a", SHORT), tools)
    assert (term.absent, engine.seen) == (Absent.HINT_OVERFLOWS, [])
    assert b.tools.health.problems() == []


async def test_while_the_policy_is_the_base_its_own_pass_serves_twice(bench, judged) -> None:
    b = bench(engine=(engine := GuidedScorer()), hint_source="verbatim", teacher="base", guidance=1.0)
    term = await hindsight(judged("hi", "a", SHORT), b.tools)
    assert (term.teacher_log_probs, term.student_log_probs, len(engine.seen)) == ((0.0,) * 3, (-1.0,) * 3, 2)
    # Not with an engine of the base's own, whose numbers are other ones.
    tools = replace(b.tools, base_teacher=(base := GuidedScorer()))
    engine.seen.clear()
    await hindsight(judged("hi", "a", SHORT), tools)
    assert (len(engine.seen), [SHORT in call[0] for call in base.seen]) == (1, [True, False])


async def test_a_guided_table_is_of_the_same_ids_with_and_without_the_hint(bench, judged) -> None:
    b = bench(engine=(engine := GuidedScorer()), hint_source="verbatim", teacher="base", guidance=1.0, top_k=2)
    b.serving.switch(7, "policy-v7")
    term = await hindsight(judged("hi", "a", SHORT), b.tools)
    assert engine.asked == ((7, 9),) * 3
    assert [(SHORT in call[0], *call[2:]) for call in engine.seen] == [
        (False, "policy-v7", "v7", 0),
        (True, None, "v0", 2),
        (False, None, "v0", 0),
    ]
    assert (term.teacher_log_probs, term.top_k.ids) == ((0.0,) * 3, ((7, 9),) * 3)
    norm = 0.4**2 / 0.2 + 0.4**2 / 0.5 + 0.2**2 / 0.3
    for row in term.top_k.log_probs:
        assert row == pytest.approx([math.log(0.8 / norm), math.log(0.32 / norm)])


async def test_of_several_hints_the_guided_teacher_chooses_and_one_pass_is_without_any(bench, judged, yes) -> None:
    value = {"Not that.": -3.0, "Like that.": -0.5}
    engine = Scorer(values=lambda text: next((v for hint, v in value.items() if hint in text), -1.0))
    b = bench(*map(yes, value), yes("Like that."), engine=engine, teacher="base", guidance=1.0, hint_votes=3)
    b.serving.switch(7, "policy-v7")
    term = await hindsight(judged("hi", "a", "x y z"), b.tools)
    assert (term.hint, term.teacher_log_probs) == ("Not that.", (-5.0,) * 3)
    assert (len(engine.seen), term.gain) == (4, 2.0)


async def test_without_guidance_nothing_more_is_scored_and_said(bench, judged) -> None:
    b = bench(engine=(engine := GuidedScorer()), hint_source="verbatim", teacher="base", guidance=0)
    b.serving.switch(7, "policy-v7")
    term = await hindsight(judged("hi", "a", SHORT), b.tools)
    assert (term.teacher_log_probs, len(engine.seen)) == ((-0.5,) * 3, 2)
    assert json.loads(term.term().to_json())["hint"].keys() == {"text", "source", "gain"}
    assert "guided_gap_abs" not in b.tools.health.means


async def test_an_empty_hint_of_a_guided_teacher_is_measured_on_the_base(bench, judged) -> None:
    class Noisy(GuidedScorer):
        async def score(self, *args: Any, **how: Any) -> Score:
            scored = await super().score(*args, **how)
            is_again = how["extra_key"] == "v0-again"
            return Score(tuple(value + 0.125 * is_again for value in scored.log_probs))

    b = bench(engine=Noisy(), hint_source="verbatim", teacher="base", guidance=1.0)
    b.serving.switch(7, "policy-v7")
    for k in range(4 * NOISE_SHARE):
        await hindsight(judged("hi", "a", SHORT, turn_id=f"turn-{k}"), b.tools)
    noise = b.tools.health.means["empty_hint_gap_abs"]
    assert noise.count > 0
    assert noise.value == 0.25  # guidance doubles it


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_base_that_fails_without_the_hint_costs_the_term(bench, judged, failure: Exception) -> None:
    class Failing(GuidedScorer):
        async def score_ids(self, *args: Any, **how: Any) -> Score:
            raise failure

    b = bench(engine=Failing(), hint_source="verbatim", teacher="base", guidance=1.0, top_k=2)
    term = await hindsight(judged("hi", "a", SHORT), b.tools)
    assert (term.absent, term.detail, b.serving.users(0)) == (Absent.TEACHER_FAILED, str(failure), 0)

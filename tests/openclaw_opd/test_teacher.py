"""The scoring pair against the fake engine: what is scored under which adapter, what is chosen, and what every failure
costs."""

import asyncio
import json
import math
from dataclasses import replace

import pytest
from teacher_scorer import FAILURES, SHORT, Scorer

from openclaw_opd import teacher
from openclaw_opd.method import Absent, hindsight
from openclaw_opd.teacher import NOISE_SHARE, gain
from openclaw_rl.engines.version_keys import cache_salt
from openclaw_rl.errors import EngineGone, JudgeError, RequestError
from openclaw_rl.messages import Message
from openclaw_rl.methods.hinted_prompt import hinted
from openclaw_rl.types import Ids


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "FIRST_PAUSE_S", 1e-6)


async def test_both_terms_are_of_one_version_and_the_served_prompt(bench, judged) -> None:
    engine = Scorer(values=lambda text: -0.5 if SHORT in text else -1.0)
    b = bench(engine=engine, hint_source="verbatim")
    b.serving.switch(7, "policy-v7")
    engine.users = lambda: b.serving.users(7)
    turn = judged("hi", "a", SHORT, tools_json='[{"b":1,"a":2}]')
    term = await hindsight(turn, b.tools)
    assert (term.teacher_log_probs, term.student_log_probs, term.scored_version) == ((-0.5,) * 3, (-1.0,) * 3, 7)
    (plain, *_), (hint, *_) = engine.seen
    assert tuple(map(ord, plain)) == turn.request.prompt_ids
    changed = hinted(turn.request.messages, SHORT)
    assert changed is not None
    assert tuple(map(ord, hint)) == b.tools.render(changed, turn.request.tools_json, None)
    assert [call[1:] for call in engine.seen] == [(turn.turn.response_ids, "policy-v7", "v7", 0)] * 2
    assert engine.held == [1, 1], "a scoring call is a user of its adapter"
    assert b.serving.users(7) == 0
    assert json.loads(term.term().to_json()) == {"hint": {"text": SHORT, "source": "verbatim", "gain": -0.5}}
    assert b.tools.health.counts == {"hindsight_scored": 1}
    assert b.tools.health.means["gap_abs"].value == 0.5


async def test_the_hints_place_is_the_settings(bench, judged) -> None:
    engine = Scorer()
    turn = judged("hi", "a", SHORT)
    await hindsight(turn, bench(engine=engine, hint_source="verbatim", hint_place="between").tools)
    told = [text for text, *_ in engine.seen if SHORT in text]
    assert len(told) == 1
    assert told[0].count("hi") == 2
    assert told[0].index("hi") < told[0].index(SHORT) < told[0].rindex("hi")


@pytest.mark.parametrize("teacher", ["base", "policy"])
async def test_the_prompt_of_a_named_user_is_scored_in_the_users_own_cache(bench, judged, teacher) -> None:
    """The engine computed the prompt for the user's chat, under this key; under no other user's key is it found."""
    engine = Scorer()
    b = bench(engine=engine, hint_source="verbatim", teacher=teacher)
    b.serving.switch(7, "policy-v7")
    await hindsight(judged("hi", "a", SHORT, user="ann"), b.tools)
    version = 0 if teacher == "base" else 7
    assert [call[3] for call in engine.seen] == [cache_salt(7, "ann"), cache_salt(version, "ann")]
    assert cache_salt(7, "ann") not in ("v7", cache_salt(7, "bob"), cache_salt(0, "ann"))


async def test_a_base_teacher_has_no_adapter(bench, judged) -> None:
    engine = Scorer()
    b = bench(engine=engine, hint_source="verbatim", teacher="base")
    b.serving.switch(7, "policy-v7")
    await hindsight(judged("hi", "a", SHORT), b.tools)
    assert [call[2:4] for call in engine.seen] == [("policy-v7", "v7"), (None, "v0")]


@pytest.mark.parametrize("has_teacher", [True, False])
async def test_an_ema_teacher_is_the_versions_own(bench, judged, has_teacher: bool) -> None:
    """Version 0 has none, nor has one from before there were any: then the teacher is that version itself."""
    engine = Scorer()
    b = bench(engine=engine, hint_source="verbatim", teacher="ema")
    b.serving.switch(7, "policy-v7")
    if has_teacher:
        b.serving.add_ema(7)
    await hindsight(judged("hi", "a", SHORT), b.tools)
    teacher_call = ("ema-v7", "ema-v7") if has_teacher else ("policy-v7", "v7")
    assert [call[2:4] for call in engine.seen] == [("policy-v7", "v7"), teacher_call]


async def test_the_trainers_own_student_needs_no_second_call(bench, judged) -> None:
    engine = Scorer()
    term = await hindsight(
        judged("hi", "a", SHORT), bench(engine=engine, hint_source="verbatim", student_term="trainer").tools
    )
    assert (term.teacher_log_probs, term.student_log_probs, len(engine.seen)) == ((-1.0,) * 3, None, 1)


async def test_the_teachers_top_k_comes_along(bench, judged) -> None:
    term = await hindsight(judged("hi", "a", SHORT), bench(engine=Scorer(), hint_source="verbatim", top_k=4).tools)
    top = json.loads(term.term().to_json())["top_k"]
    assert top == {"ids": [[0, 1, 2, 3]] * 3, "log_probs": [[-1.0, -2.0, -3.0, -4.0]] * 3}


@pytest.mark.parametrize(
    ("verdict", "chosen"),
    [(-1, "Not that."), (1, "Like that."), (0, "Not that."), (None, "Not that.")],
)
async def test_the_hint_that_sees_the_reply_as_the_user_did_wins(bench, judged, yes, verdict, chosen) -> None:  # D26
    value = {"Not that.": -3.0, "Like that.": -0.5, "Say it well, and long, and with all the care you have.": -1.0}
    engine = Scorer(values=lambda text: next((v for hint, v in value.items() if hint in text), -1.0))
    never = asyncio.Event()
    b = bench(*map(yes, value), never, never, engine=engine, hint_votes=5)  # the third decides
    term = await hindsight(judged("hi", "a", "x y z", verdict=verdict), b.tools)
    assert (term.hint, term.source, len(engine.seen)) == (chosen, "judge", 4)
    assert term.teacher_log_probs == (value[chosen],) * 3


def test_the_gain_by_hand() -> None:
    teacher_, student, mask = (-1.0, -5.0, -9.0), (-2.0, -1.0, 0.0), (True, True, False)
    # gaps 1, -4 → clipped 1, -2; the third token is not trained
    assert gain(teacher_, student, mask, clip=2, verdict=1) == -0.5
    assert gain(teacher_, student, mask, clip=2, verdict=-1) == 0.5
    assert gain(teacher_, student, mask, clip=2, verdict=0) == 1.5
    assert gain(teacher_, student, (False,) * 3, clip=2, verdict=1) == 0.0


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failing_teacher_costs_the_term_only(bench, judged, failure: Exception) -> None:  # D27, D8
    b = bench(engine=Scorer(script=[failure] * 9), hint_source="verbatim")
    term = await hindsight(judged("hi", "a", SHORT), b.tools)
    assert (term.absent, term.detail) == (Absent.TEACHER_FAILED, str(failure))
    assert (term.teacher_log_probs, term.student_log_probs, term.scored_version) == (None, None, None)
    assert json.loads(term.term().to_json()) == {
        "hint": {"absent": "teacher_failed", "detail": str(failure), "source": "verbatim"}
    }
    assert b.tools.health.counts == {"hindsight_teacher_failed": 1}
    assert b.serving.users(0) == 0


@pytest.mark.parametrize("failure", FAILURES)
async def test_after_a_failure_the_pair_is_scored_anew(bench, judged, failure: Exception) -> None:
    b = bench(engine=(engine := Scorer()), hint_source="verbatim")
    calls = 0

    def values(text: str) -> float:
        nonlocal calls
        calls += 1
        if calls == 2:
            b.serving.switch(3, "policy-v3")
            raise failure
        return -1.0

    engine.values = values
    term = await hindsight(judged("hi", "a", SHORT), b.tools)
    assert term.absent is None
    assert [call[2] for call in engine.seen] == [None, None, "policy-v3", "policy-v3"]
    assert term.scored_version == 3


async def test_a_silent_teacher_is_given_up(bench, judged) -> None:
    b = bench(engine=Scorer(script=[asyncio.Event()] * 9), hint_source="verbatim", score_timeout_s=0.01)
    term = await hindsight(judged("hi", "a", SHORT), b.tools)
    assert (term.absent, term.detail) == (Absent.TEACHER_FAILED, "no answer within 0.01 s")
    assert not b.tools.slots.locked()


async def test_a_closed_gate_is_a_failing_teacher(bench, judged) -> None:
    b = bench(engine=Scorer(), hint_source="verbatim")
    b.serving.hold()
    term = await hindsight(judged("hi", "a", SHORT), b.tools)
    assert term.absent is Absent.TEACHER_FAILED
    assert term.absent.may_work_later


async def test_weights_replaced_in_between_are_noticed(bench, judged) -> None:
    b = bench(engine=(engine := Scorer()), hint_source="verbatim")

    def values(text: str) -> float:
        if len(engine.seen) == 1:
            b.serving.switch(1, None)  # full weights: the same engine, no adapter
        return -float(b.serving.current)

    engine.values = values
    term = await hindsight(judged("hi", "a", SHORT), b.tools)
    assert (term.scored_version, term.student_log_probs, term.teacher_log_probs) == (1, (-1.0,) * 3, (-1.0,) * 3)


async def test_a_hint_that_overflows_is_counted(bench, judged) -> None:
    turn = judged("hi", "a", SHORT)
    length = len(turn.request.prompt_ids) + len(turn.turn.response_ids)
    b = bench(engine=(engine := Scorer()), hint_source="verbatim", context_length=length + 5)
    term = await hindsight(turn, b.tools)
    assert (term.absent, engine.seen) == (Absent.HINT_OVERFLOWS, [])
    assert f"the context holds {length + 5}" in term.detail


async def test_of_several_hints_one_that_fits_is_taken(bench, judged, yes) -> None:
    turn, long = judged("hi", "a", "x y z"), "Be brief, " * 20
    length = len(turn.request.prompt_ids) + len(turn.turn.response_ids)
    b = bench(yes(long), yes(SHORT), yes(SHORT), engine=Scorer(), context_length=length + 80)
    assert (await hindsight(turn, b.tools)).hint == SHORT


async def test_a_prompt_that_renders_otherwise_now_is_not_scored(bench, judged) -> None:
    b = bench(engine=(engine := Scorer()), hint_source="verbatim")
    turn = judged("hi", "a", SHORT)
    other = replace(turn, request=replace(turn.request, prompt_ids=(*turn.request.prompt_ids[:-1], 1)))
    assert (await hindsight(other, b.tools)).absent is Absent.PROMPT_CHANGED

    def refuse(*_: object) -> Ids:
        raise RequestError("no such template")

    term = await hindsight(turn, replace(b.tools, render=refuse))
    assert (term.absent, term.detail, engine.seen) == (Absent.PROMPT_CHANGED, "no such template", [])


async def test_without_a_users_message_there_is_no_place(bench, judged) -> None:
    turn = judged([Message(role="system", content="hi")], "a", SHORT)
    assert (await hindsight(turn, bench(hint_source="verbatim").tools)).absent is Absent.NO_USER_MESSAGE


async def test_a_log_prob_that_is_no_number_is_no_term(bench, judged) -> None:
    b = bench(engine=Scorer(values=lambda text: math.nan), hint_source="verbatim")
    assert (await hindsight(judged("hi", "a", SHORT), b.tools)).absent is Absent.NON_FINITE


async def test_an_empty_hint_is_measured_on_a_share_of_turns(bench, judged) -> None:
    engine = Scorer()
    b = bench(engine=engine, hint_source="verbatim")
    for k in range(8 * NOISE_SHARE):
        await hindsight(judged("hi", "a", SHORT, turn_id=f"turn-{k}"), b.tools)
    noise = b.tools.health.means["empty_hint_gap_abs"]
    assert noise.value == 0.0
    assert 1 <= noise.count < 3 * 8
    again = [call for call in engine.seen if call[3] == "v0-again"]
    assert len(again) == noise.count
    assert all(SHORT not in call[0] for call in again)


async def test_calls_at_once_are_bounded_and_health_is_told(bench, judged) -> None:
    b = bench(engine=Scorer(script=[EngineGone("gone")] * 9), hint_source="verbatim")
    tools = replace(b.tools, slots=asyncio.Semaphore(1))
    for _ in range(3):
        await hindsight(judged("hi", "a", SHORT), tools)
    assert tools.health.problems() == ["teacher: failed 3 times in a row, last: gone"]
    hold = asyncio.Event()
    assert isinstance(b.engine, Scorer)
    b.engine.script, b.engine.seen = [hold], []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(hindsight(judged("hi", "a", SHORT), tools)) for _ in range(3)]
        while not b.engine.seen:
            await asyncio.sleep(0)
        assert len(b.engine.seen) == b.serving.users(0) == 1
        hold.set()
    assert all(task.result().absent is None for task in tasks)
    assert tools.health.problems() == []


async def test_a_dead_hint_judge_is_told_too(bench, judged, no) -> None:
    b = bench(*[JudgeError("503")] * 9, no, no, no)
    for _ in range(3):
        assert (await hindsight(judged("hi", "a", "x y z"), b.tools)).absent is Absent.JUDGE_FAILED
    assert b.tools.health.problems() == ["hint judge: failed 3 times in a row, last: 503"]
    assert (await hindsight(judged("hi", "a", "x y z"), b.tools)).absent is Absent.NO_HINT
    assert b.tools.health.problems() == []


async def test_the_fake_engine_will_do(bench, judged) -> None:
    term = await hindsight(judged("hi", "a", SHORT), bench(hint_source="verbatim", top_k=3).tools)
    assert term.absent is None
    assert term.teacher_log_probs is not None
    assert len(term.teacher_log_probs) == 3


async def test_a_base_teacher_of_its_own_scores_the_hint_and_the_policys_engine_the_reply(bench, judged) -> None:
    engine, base = Scorer(values=lambda text: -1.0), Scorer(values=lambda text: -0.25)
    b = bench(engine=engine, hint_source="verbatim", teacher="base")
    b.serving.switch(7, "policy-v7")
    term = await hindsight(judged("hi", "a", SHORT), replace(b.tools, base_teacher=base))
    assert (term.teacher_log_probs, term.student_log_probs, term.scored_version) == ((-0.25,) * 3, (-1.0,) * 3, 7)
    assert [call[2:] for call in engine.seen] == [("policy-v7", "v7", 0)]
    assert [call[2:] for call in base.seen] == [(None, "v0", 0)]

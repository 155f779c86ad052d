"""Where hints come from, how the judge's candidates vote, and which hints are refused."""

import asyncio
from dataclasses import replace

import pytest

from openclaw_opd.hindsight import Absent
from openclaw_opd.hints import correction, find_hints
from openclaw_rl.errors import JudgeError
from openclaw_rl.judge.llm import Answer
from openclaw_rl.messages import Message
from openclaw_rl.types import Feedback

SHORT = "Answer in one sentence."


async def test_the_majority_says_whether_there_is_a_hint(bench, judged, yes, no) -> None:  # D26: one vote is not enough
    found = await find_hints(judged("hi", "a", "too long"), bench(no, yes(SHORT), yes("Be brief.")).tools)
    assert (found.hints, found.source) == ((SHORT, "Be brief."), "judge")
    found = await find_hints(judged("hi", "a", "thanks"), bench(yes(SHORT), no, no).tools)
    assert (found.hints, found.absent) == ((), Absent.NO_HINT)


async def test_it_stops_when_it_is_decided(bench, judged, yes, no) -> None:
    never = asyncio.Event()
    b = bench(never, no, no)
    assert (await find_hints(judged("hi", "a", "thanks"), b.tools)).absent is Absent.NO_HINT
    assert b.ask.cancelled == 1
    b = bench(yes(SHORT), never, yes(SHORT))
    assert (await find_hints(judged("hi", "a", "shorter"), b.tools)).hints == (SHORT,)
    assert b.ask.cancelled == 1


async def test_without_a_majority_there_is_no_hint(bench, judged, yes, no) -> None:
    b = bench(yes(SHORT), no, hint_votes=2)
    assert (await find_hints(judged("hi", "a", "x y z"), b.tools)).absent is Absent.HINT_UNDECIDED
    b = bench("what?", "\\boxed{1}", yes(SHORT))
    found = await find_hints(judged("hi", "a", "x y z"), b.tools)
    assert (found.absent, found.detail) == (Absent.HINT_UNDECIDED, "half_open, no_decision")
    assert b.tools.health.counts == {
        "hint_answer_half_open": 1,
        "hint_answer_no_decision": 1,
        "hint_answers": 2,
    }


async def test_a_judge_that_fails_is_told_from_one_that_finds_none(bench, judged, yes) -> None:
    b = bench(JudgeError("503"), JudgeError("503"), yes(SHORT))
    found = await find_hints(judged("hi", "a", "x y z"), b.tools)
    assert (found.absent, found.detail) == (Absent.JUDGE_FAILED, "503")
    assert Absent.JUDGE_FAILED.may_work_later
    b = bench(JudgeError("503"), yes(SHORT), yes(SHORT))
    assert (await find_hints(judged("hi", "a", "x y z"), b.tools)).hints == (SHORT,)


async def test_a_cut_answer_gets_one_larger_budget(bench, judged, yes) -> None:
    cut = Answer(yes(SHORT), is_cut=True)
    b = bench(cut, yes(SHORT), hint_votes=1, hint_max_tokens=100)
    assert (await find_hints(judged("hi", "a", "shorter"), b.tools)).hints == (SHORT,)
    assert b.ask.budgets == [100, 200]
    b = bench(yes(SHORT), hint_votes=1)
    await find_hints(judged("hi", "a", "shorter"), b.tools)
    assert b.ask.budgets == [b.tools.judge_tokens]  # unset: the budget of all judge calls


async def test_a_budget_that_cuts_many_hints_is_a_problem_until_it_is_larger(bench, judged, yes) -> None:
    cut, whole = Answer("thought", is_cut=True), yes(SHORT)
    b = bench(*[cut, cut, whole] * 5, *[whole] * 60, hint_votes=1)
    for _ in range(10):
        await find_hints(judged("hi", "a", "shorter"), b.tools)
    assert b.tools.health.counts == {"hint_answer_cut": 5, "hint_answers": 10}
    assert b.tools.health.problems() == [
        "hint answers: failed once: 5 of the last 10 ended at their token limit: raise judge.max_new_tokens"
    ]
    for _ in range(50):
        await find_hints(judged("hi", "a", "shorter"), b.tools)
    assert b.tools.health.problems() == []


@pytest.mark.parametrize("said", ["Be brief.", "\\boxed{1}", "\\boxed{1} [HINT_START] [HINT_END]", "<think>Hm."])
async def test_a_judge_that_decides_nothing_is_a_problem_until_it_does(bench, judged, no, said) -> None:
    """A small base that judges itself: no turn would ever be trained on, and nobody would hear of it."""
    b = bench(*[said, said, no] * 4, *[no] * 60, hint_votes=1)
    for _ in range(9):
        await find_hints(judged("hi", "a", "shorter"), b.tools)
    assert b.tools.health.problems() == []
    await find_hints(judged("hi", "a", "shorter"), b.tools)
    (problem,) = b.tools.health.problems()
    assert problem.startswith("hint answers' form: failed once: 7 of the last 10 hold no decision: name a larger judge")
    for _ in range(50):
        await find_hints(judged("hi", "a", "shorter"), b.tools)
    assert b.tools.health.problems() == []


async def test_a_comment_is_a_hint_without_a_judge(bench, judged) -> None:
    turn = judged("hi", "a", "thanks", verdict=1, comment="  Use\nmetric units. ")
    for b in (bench(), bench(hint_source="verbatim")):
        found = await find_hints(turn, b.tools)
        assert (found.hints, found.source, b.ask.prompts) == (("Use metric units.",), "feedback", [])
    turn = judged("hi", "a", comment="old")
    newer = (*turn.feedback, Feedback("g", "t", 4.0, comment="newer words"), Feedback("h", "t", 5.0, value=-1.0))
    assert (await find_hints(replace(turn, feedback=newer), bench().tools)).hints == ("newer words",)


async def test_nothing_said_is_no_question(bench, judged) -> None:
    b = bench()
    assert (await find_hints(judged("hi", "a"), b.tools)).absent is Absent.NO_HINT
    assert b.ask.prompts == []


@pytest.mark.parametrize(
    ("following", "verdict", "hints"),
    [
        ("No lists please.", -1, ("No lists please.",)),
        (
            "[Fri 2026-11-27 22:18 UTC] Too long.\n> my quote of it\n```\ncode\n```\nShorter!",
            -1,
            ("Too long. Shorter!",),
        ),
        ("请用一句话回答", -1, ("请用一句话回答",)),
        # a client's decoration is nobody's wish; a user's own bracket is
        ("<system-reminder>\nUse the todo list.\n</system-reminder>\nShorter, please.", -1, ("Shorter, please.",)),
        ("Shorter, please.\n\n[Current time: 12:02]", -1, ("Shorter, please.",)),
        ("Shorter [three words].", -1, ("Shorter [three words].",)),
        ("[Again] Shorter, please [three words]", -1, ("[Again] Shorter, please [three words]",)),
        ("Thanks, that is it!", 1, ()),
        ("Well then.", 0, ()),
        ("Well then.", None, ()),
        ("Sort these:  c a b", -1, ()),  # the request again
        ("no", -1, ()),
        ("/new", -1, ()),
        (Message(role="tool", content="error: no such file, try again", tool_call_id="x"), -1, ()),
    ],
)
async def test_verbatim_is_the_users_own_correction(bench, judged, following, verdict, hints) -> None:
    b = bench(hint_source="verbatim")
    found = await find_hints(judged("Sort these: c a b", "a b c", following, verdict=verdict), b.tools)
    assert found.hints == hints
    assert found.absent is (None if hints else Absent.NO_HINT)
    assert b.ask.prompts == []


def test_a_correction_leaves_out_what_no_user_said() -> None:
    internal = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nsecret\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    poll = "Follow the heartbeat monitor scratch context when provided. x"
    texts = ("[Fri 2026-11-27 22:18 UTC] shorter please", internal, poll)
    messages = [Message(role="user", content=text) for text in texts] + [Message(role="tool", content="result")]
    assert correction(messages) == "shorter please"


REPLY = "The quick brown fox jumps over the lazy dog and then runs far away into the woods"


@pytest.mark.parametrize(
    ("hint", "detail"),
    [
        ("Say: the quick brown fox jumps over the lazy dog", "quotes the reply"),
        ("You said THE QUICK, brown fox; jumps over the lazy cat", "quotes the reply"),
        ("You said quick brown fox jumps over the lazy cat", None),
        ("Keep to the quick brown fox", None),
        ("long " * 300, "too long"),
    ],
)
async def test_a_hint_may_not_give_the_reply_away(bench, judged, yes, hint: str, detail: str | None) -> None:
    turn = judged("A story?", REPLY, "No. Shorter.", comment=hint)
    found = await find_hints(turn, bench().tools)
    assert found.detail == (detail or "")
    assert bool(found.hints) == (detail is None)


@pytest.mark.parametrize("text", ["<|im_end|>", "\\boxed{1}", "[HINT_START]Praise me.[HINT_END]", "</think>"])
async def test_a_users_markers_are_words_of_a_hint(bench, judged, text: str) -> None:
    """They go into the teacher's prompt, where the front end takes no text for a special token."""
    found = await find_hints(judged("hi", f"a {text}", f"Shorter, no {text}"), bench(hint_source="verbatim").tools)
    assert found.hints == (f"Shorter, no {text}",)


@pytest.mark.parametrize("following", ["No. " + "word " * 6000, "不 " + "字" * 30_000])
async def test_a_long_next_state_is_no_hint(bench, judged, following: str) -> None:
    reply = "y" * 30_000
    found = await find_hints(judged("hi", reply, following), bench(hint_source="verbatim").tools)
    assert (found.absent, found.detail) == (Absent.HINT_REJECTED, "too long")
    found = await find_hints(judged("hi", reply, "No, shorter."), bench(hint_source="verbatim").tools)
    assert found.hints == ("No, shorter.",)


async def test_a_judges_hint_may_not_retell_what_came_next(bench, judged, yes) -> None:
    following = " ".join(f"word{k}" for k in range(40))
    leak = " ".join(f"word{k}" for k in range(5, 30))
    found = await find_hints(judged("hi", "a", following), bench(yes(leak), yes(leak), yes(leak)).tools)
    assert (found.absent, found.detail) == (Absent.HINT_REJECTED, "retells what came next")
    found = await find_hints(judged("hi", "a", following), bench(yes(leak), yes(SHORT), yes(leak)).tools)
    assert found.absent is Absent.HINT_REJECTED or found.hints == (SHORT,)  # decided by the first two
    found = await find_hints(judged("hi", "a", leak), bench(hint_source="verbatim").tools)
    assert found.hints == (leak,)

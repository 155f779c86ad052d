"""The workers: every paired turn gets a verdict and a sample, or a reason; no failure of one stops the others."""

import asyncio
from dataclasses import replace

import httpx
import pytest
from workers import FAST, SETTINGS, MemoryLedger, ScriptedJudge, judging

from openclaw_rl.errors import AlignmentError, JudgeError, TeacherError
from openclaw_rl.judge.judge import Undecided
from openclaw_rl.messages import FunctionCall, Message, ToolCall
from openclaw_rl.methods.base import Dropped, ScoringTools
from openclaw_rl.scoring.stage import StageLimits
from openclaw_rl.scoring.workers import report_unreached, score_turns
from openclaw_rl.settings.loading import load
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import DropReason, JudgedTurn, Sample, VersionRun


async def test_every_turn_is_judged_and_the_next_stage_woken() -> None:
    ledger, judge, judged = MemoryLedger().add(*"abcdef"), ScriptedJudge({"b": [-1], "c": [0]}), asyncio.Event()
    async with judging(ledger, judge, judged=judged):
        assert await ledger.until(6) == {"a": 1, "b": -1, "c": 0, "d": 1, "e": 1, "f": 1}
    assert judged.is_set()
    assert judge.most_at_once == SETTINGS.workers
    assert sorted(judge.seen) == list("abcdef")


async def test_after_the_last_retry_it_is_unjudged_and_never_zero() -> None:
    judge = ScriptedJudge({"a": [JudgeError("down")] * 9})
    ledger = MemoryLedger().add("a", "b")
    async with judging(ledger, judge):
        assert await ledger.until(2) == {"b": 1, "a": "no verdict"}
    assert judge.seen.count("a") == 1 + SETTINGS.retries


async def test_a_turn_given_up_wakes_the_next_stage_and_the_meters_tell() -> None:
    judge, judged, health = ScriptedJudge({"a": [JudgeError("down")] * 3}), asyncio.Event(), Health()
    ledger = MemoryLedger().add("a")
    async with judging(ledger, judge, judged=judged, health=health):
        await ledger.until(1)
        assert health.problems() == ["judge: failed 3 times in a row, last: down"]
        async with asyncio.timeout(120):
            await judged.wait()
        ledger.add("b")
        await ledger.until(2)
    assert health.problems() == []


CALL = ToolCall(function=FunctionCall(name="count"))
THOUGHT = "First, count the letters. Then"


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        (Message(role="assistant", content="", reasoning_content=THOUGHT), 0),
        (Message(role="assistant", content=None, reasoning_content=THOUGHT), 0),
        (Message(role="assistant", content=f"<think>\n{THOUGHT}"), 0),  # no reasoning parser
        (Message(role="assistant", content=f"[THINK]{THOUGHT}"), 0),
        (Message(role="assistant", content=f"<think>{THOUGHT}</think>\n"), 0),
        (Message(role="assistant", content=" \n"), 0),
        (Message(role="assistant", content="Six.", reasoning_content=THOUGHT), 1),
        (Message(role="assistant", content=f"<think>{THOUGHT}</think>\nSix."), 1),
        (Message(role="assistant", reasoning_content=THOUGHT, tool_calls=[CALL]), 1),
    ],
)
async def test_a_reply_that_was_cut_inside_its_thought_earns_no_praise(reply: Message, verdict: int) -> None:
    """The client got no answer (`finish_reason: length`), so its next message cannot mean this reply."""
    judge, ledger = ScriptedJudge({"b": [-1]}), MemoryLedger().add("a", "b")
    for turn_id, turn in ledger.waiting.items():
        ledger.waiting[turn_id] = replace(turn, turn=replace(turn.turn, reply=reply, finish_reason="length"))
    async with judging(ledger, judge):
        assert await ledger.until(2) == {"a": verdict, "b": -1}


async def test_undecided_is_not_asked_again() -> None:
    judge, ledger = ScriptedJudge({"a": [Undecided("a tie, twice")]}), MemoryLedger().add("a")
    async with judging(ledger, judge):
        assert await ledger.until(1) == {"a": "no verdict"}
    assert judge.seen == ["a"]


@pytest.mark.parametrize(
    "fault", [KeyError("bug"), UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"), RecursionError()], ids=type
)
async def test_an_unforeseen_fault_costs_one_turn_time_and_never_the_server(fault: Exception) -> None:
    judge, ledger = ScriptedJudge({"a": [fault]}), MemoryLedger().add("a", "b")
    async with judging(ledger, judge):
        assert await ledger.until(2) == {"a": 1, "b": 1}
    assert judge.seen.count("a") == 2


async def test_a_turn_that_always_faults_is_given_up() -> None:
    judge, ledger = ScriptedJudge({"a": [KeyError("bug")] * 9}), MemoryLedger().add("a", "b")
    async with judging(ledger, judge):
        assert await ledger.until(2) == {"a": "unjudged: unexpected KeyError('bug')", "b": 1}
    assert judge.seen.count("a") == 1 + SETTINGS.retries


class ScriptedMethod:
    """Per turn what `score` makes; else a sample of reward 1."""

    name = "scripted"

    def __init__(self, script: dict[str, list[Dropped | Exception]] | None = None) -> None:
        self.script = script or {}

    async def score(self, judged: JudgedTurn, tools: ScoringTools) -> Sample | Dropped:
        said = self.script.get(judged.turn.turn_id, [])
        made = said.pop(0) if said else None
        if isinstance(made, Exception):
            raise made
        return made or Sample(
            sample_id=judged.turn.turn_id,
            prompt_ids=(1,),
            response_ids=(3,),
            loss_mask=(True,),
            rollout_log_probs=(-0.1,),
            versions=(VersionRun(0, 1),),
            temperature=0.7,
            reward=1.0,
        )


async def test_scoring_makes_samples_or_reasons() -> None:
    method = ScriptedMethod(
        {
            "useless": [Dropped(DropReason.METHOD, "no hint")],
            "flaky": [TeacherError("down"), TeacherError("down")],
            "hopeless": [TeacherError("down")] * 9,
            "crooked": [AlignmentError("3 ids, 2 log-probs")],
        }
    )
    ledger, sampled = MemoryLedger().add("fine", "useless", "flaky", "hopeless", "crooked"), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            score_turns(
                ledger,
                method,
                ScoringTools(),
                StageLimits(workers=2, retries=2),
                asyncio.Event(),
                sampled=sampled,
                times=FAST,
            )
        )
        ended = await ledger.until(5)
        task.cancel()
    assert ended == {
        "fine": 1.0,
        "useless": "method: no hint",
        "flaky": 1.0,
        "hopeless": "method: teacher: down",
        "crooked": "misaligned: 3 ids, 2 log-probs",
    }
    assert sampled.is_set()


OPD_JUDGE = {"method.name": "opd", "method.hint_source": "judge"}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"judge.kind": "llm"}, ["judge"]),
        (OPD_JUDGE, ["hint judge"]),
        (OPD_JUDGE | {"judge.kind": "llm"}, ["hint judge", "judge"]),
        ({"method.name": "combine", "method.hint_source": "judge"}, ["hint judge"]),
    ],
)
async def test_a_judge_that_is_away_is_told_until_it_is_reached(given: dict, parts: list[str]) -> None:
    health, problems = Health(), []

    def handler(request: httpx.Request) -> httpx.Response:
        problems.append(health.problems())
        if len(problems) < 10:
            raise httpx.ConnectError("refused")
        return httpx.Response(404)

    settings = load(None, given | {"judge.url": "http://judge/v1", "judge.model": "grader"}, {})
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
        await report_unreached(settings, client, health, pause_s=0)
    assert problems[0] == []
    assert [problem.partition(":")[0] for problem in problems[-1]] == parts
    assert all("did not answer at http://judge/v1/models" in problem for problem in problems[-1])
    assert health.problems() == []


@pytest.mark.parametrize("given", [{}, {"judge.kind": "llm"}, OPD_JUDGE, {"judge.url": "http://judge/v1"}])
async def test_a_judge_that_is_not_asked_or_has_no_address_is_not_looked_for(given: dict) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise AssertionError(request.url)

    async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
        await report_unreached(load(None, given, {}), client, Health())

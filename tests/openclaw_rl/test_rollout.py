"""The workers: every paired turn gets a verdict and a sample, or a reason; no failure of one stops the others."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from openclaw_rl.errors import AlignmentError, JudgeError, LedgerError, LedgerUnavailable, TeacherError
from openclaw_rl.judge.judge import Undecided
from openclaw_rl.messages import Message
from openclaw_rl.meters import Meters
from openclaw_rl.methods.base import Dropped, ScoringTools
from openclaw_rl.rollout import Pace, judge_turns, score_turns
from openclaw_rl.settings import JudgeSettings
from openclaw_rl.types import (
    DropReason,
    JudgedTurn,
    NextState,
    Request,
    Sample,
    SamplingParams,
    Scope,
    Turn,
    TurnState,
    Verdict,
    VersionRun,
)

FAST = Pace(
    poll_s=0.02,
    first_rest_s=0.001,
    longest_rest_s=0.005,
    ledger_pause_s=0.001,
    longest_ledger_pause_s=0.002,
    longest_outage_rest_s=0.002,
)
SETTINGS = JudgeSettings(workers=2, retries=2)


def judged_turn(name: str) -> JudgedTurn:
    return JudgedTurn(
        request=Request(
            request_id=f"r-{name}",
            scope=Scope("uma", "s"),
            received_at=1.0,
            messages=(Message(role="user", content="hi"),),
            tools_json=None,
            template_kwargs_json=None,
            prompt_ids=(1, 2),
            sampling=SamplingParams(max_new_tokens=8),
        ),
        turn=Turn(
            turn_id=name,
            request_id=f"r-{name}",
            finished_at=2.0,
            response_ids=(3,),
            rollout_log_probs=(-0.1,),
            loss_mask=(True,),
            versions=(VersionRun(0, 1),),
            finish_reason="stop",
            reply=Message(role="assistant", content="hello"),
        ),
        next_state=NextState((Message(role="user", content="thanks"),)),
    )


@dataclass
class MemoryLedger:
    """The few methods the workers use. `outage` counts calls that still fail; it will not write `refused` turns."""

    waiting: dict[str, JudgedTurn] = field(default_factory=dict)
    ended: dict[str, object] = field(default_factory=dict)
    outage: int = 0
    refused: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def _call(self, turn_id: str | None = None) -> None:
        if self.outage:
            self.outage -= 1
            raise LedgerUnavailable("disk full")
        if turn_id in self.refused:
            raise LedgerError(f"turn {turn_id} cannot become judged")

    async def _take(self, limit: int, *, skip: Collection[str]) -> list[JudgedTurn]:
        await asyncio.sleep(0)
        self._call()
        return [turn for name, turn in self.waiting.items() if name not in skip][:limit]

    to_judge = to_score = _take

    async def _end(self, turn_id: str, what: object) -> None:
        await asyncio.sleep(0)
        self._call(turn_id)
        assert turn_id not in self.ended, "a turn ends once"
        del self.waiting[turn_id]
        self.ended[turn_id] = what
        self.changed.set()

    async def record_verdict(self, turn_id: str, verdict: Verdict | None) -> None:
        await self._end(turn_id, "no verdict" if verdict is None else verdict.value)

    async def record_sample(self, sample: Sample, *, seen_feedback: int | None = None) -> None:
        await self._end(sample.sample_id, sample.reward)

    async def drop(
        self, turn_id: str, reason: DropReason, detail: str = "", *, seen_feedback: int | None = None
    ) -> None:
        await self._end(turn_id, f"{reason}: {detail}")

    async def shed(self, state: TurnState, keep: int) -> int:
        self._call()
        shed = [*self.waiting][: max(0, len(self.waiting) - keep)] if state is TurnState.PAIRED else []
        for name in shed:
            await self._end(name, "backlog")
        return len(shed)

    def add(self, *names: str) -> "MemoryLedger":
        self.waiting |= {name: judged_turn(name) for name in names}
        return self

    async def until(self, count: int) -> dict[str, object]:
        """What became of the turns, once `count` of them have ended."""
        async with asyncio.timeout(120):
            while len(self.ended) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.ended


@dataclass
class ScriptedJudge:
    """Per turn a list of what it says; then +1 for ever."""

    script: dict[str, list[int | Exception]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    hold: asyncio.Event | None = None
    asked: dict[str, asyncio.Event] = field(default_factory=dict)
    """Set when the judge is asked about a turn."""

    async def verdict(self, judged: JudgedTurn) -> Verdict:
        name = judged.turn.turn_id
        self.seen.append(name)
        if name in self.asked:
            self.asked[name].set()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await (self.hold.wait() if self.hold else asyncio.sleep(0))
        finally:
            self.at_once -= 1
        said = self.script.get(name, [])
        value = said.pop(0) if said else 1
        if isinstance(value, Exception):
            raise value
        return Verdict(value, (value,), source="scripted")


@asynccontextmanager
async def judging(
    ledger, judge, *, wake=None, judged=None, meters=None, pace=FAST, settings=SETTINGS
) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        worker = group.create_task(
            judge_turns(ledger, judge, settings, wake or asyncio.Event(), judged=judged, meters=meters, pace=pace)
        )
        yield
        worker.cancel()


async def test_every_turn_is_judged_and_the_next_stage_woken() -> None:
    ledger, judge, judged = MemoryLedger().add(*"abcdef"), ScriptedJudge({"b": [-1], "c": [0]}), asyncio.Event()
    async with judging(ledger, judge, judged=judged):
        assert await ledger.until(6) == {"a": 1, "b": -1, "c": 0, "d": 1, "e": 1, "f": 1}
    assert judged.is_set()
    assert judge.most_at_once == SETTINGS.workers
    assert sorted(judge.seen) == list("abcdef")


async def test_a_new_turn_wakes_the_worker() -> None:
    ledger, wake = MemoryLedger(), asyncio.Event()
    async with judging(ledger, ScriptedJudge(), wake=wake, pace=Pace(poll_s=1000.0)):
        await asyncio.sleep(0)
        ledger.add("late")
        wake.set()
        assert await ledger.until(1) == {"late": 1}


async def test_a_turn_nobody_told_of_is_found() -> None:
    ledger = MemoryLedger()
    async with judging(ledger, ScriptedJudge()):
        await asyncio.sleep(0)
        ledger.add("silent")
        assert await ledger.until(1) == {"silent": 1}


async def test_a_judge_that_fails_is_asked_again() -> None:
    judge = ScriptedJudge({"a": [JudgeError("503"), JudgeError("503"), -1]})
    ledger = MemoryLedger().add("a", "b", "c")
    async with judging(ledger, judge):
        assert await ledger.until(3) == {"b": 1, "c": 1, "a": -1}


async def test_after_the_last_retry_it_is_unjudged_and_never_zero() -> None:
    judge = ScriptedJudge({"a": [JudgeError("down")] * 9})
    ledger = MemoryLedger().add("a", "b")
    async with judging(ledger, judge):
        assert await ledger.until(2) == {"b": 1, "a": "no verdict"}
    assert judge.seen.count("a") == 1 + SETTINGS.retries


async def test_a_turn_given_up_wakes_the_next_stage_and_the_meters_tell() -> None:
    judge, judged, meters = ScriptedJudge({"a": [JudgeError("down")] * 3}), asyncio.Event(), Meters()
    ledger = MemoryLedger().add("a")
    async with judging(ledger, judge, judged=judged, meters=meters):
        await ledger.until(1)
        assert meters.problems() == ["judge: failed 3 times in a row, last: down"]
        async with asyncio.timeout(120):
            await judged.wait()
        ledger.add("b")
        await ledger.until(2)
    assert meters.problems() == []


async def test_while_the_judge_is_down_no_turn_uses_up_its_tries_and_all_are_judged_when_it_is_back() -> None:
    names = [f"t{n}" for n in range(8)]
    script = {name: [JudgeError("down")] * 20 for name in names}
    judge, ledger = ScriptedJudge(script), MemoryLedger().add(*names)
    async with judging(ledger, judge):
        async with asyncio.timeout(120):
            while len(judge.seen) < 60:  # far more than the tries of all
                await asyncio.sleep(0.001)
        assert ledger.ended == {}
        assert {name for name in judge.seen[6:60]} == set(names), "none stands before the rest"
        script.clear()
        assert await ledger.until(8) == dict.fromkeys(names, 1)


async def test_one_turn_at_a_time_is_tried_while_all_fail() -> None:
    names = [f"t{n}" for n in range(6)]
    judge = ScriptedJudge({name: [JudgeError("down")] * 50 for name in names})
    async with judging(MemoryLedger().add(*names), judge):
        async with asyncio.timeout(120):
            while len(judge.seen) < 10:
                await asyncio.sleep(0.001)
            judge.most_at_once = 0
            while len(judge.seen) < 40:
                await asyncio.sleep(0.001)
    assert judge.most_at_once == 1


async def test_what_waits_for_a_judge_is_bounded_and_the_oldest_end() -> None:
    judge, ledger = ScriptedJudge(hold=asyncio.Event()), MemoryLedger().add(*(f"t{n}" for n in range(9)))
    settings = JudgeSettings(workers=2, retries=2, max_waiting=6)
    async with judging(ledger, judge, settings=settings):
        await ledger.until(3)
    assert ledger.ended == dict.fromkeys(("t0", "t1", "t2"), "backlog")


async def test_undecided_is_not_asked_again() -> None:
    judge, ledger = ScriptedJudge({"a": [Undecided("a tie, twice")]}), MemoryLedger().add("a")
    async with judging(ledger, judge):
        assert await ledger.until(1) == {"a": "no verdict"}
    assert judge.seen == ["a"]


async def test_a_ledger_outage_loses_no_verdict() -> None:
    judge, ledger = ScriptedJudge(), MemoryLedger(outage=3).add("a", "b")
    async with judging(ledger, judge):
        assert await ledger.until(2) == {"a": 1, "b": 1}
        judge.hold, judge.asked["c"] = asyncio.Event(), asyncio.Event()
        ledger.add("c")
        await judge.asked["c"].wait()
        ledger.outage = 4
        judge.hold.set()
        assert (await ledger.until(3))["c"] == 1
    assert judge.seen.count("c") == 1, "the verdict was kept while the ledger could not write"


async def test_a_turn_the_ledger_refuses_does_not_spin() -> None:
    judge, ledger = ScriptedJudge(), MemoryLedger(refused={"a"}).add("a", "b", "c")
    async with judging(ledger, judge, pace=Pace(poll_s=0.01, first_rest_s=1000.0, longest_rest_s=1000.0)):
        assert await ledger.until(2) == {"b": 1, "c": 1}
    assert judge.seen.count("a") == 1


class CountingEvent(asyncio.Event):
    """The loop clears it once a round."""

    clears = 0

    def clear(self) -> None:
        self.clears += 1
        super().clear()


async def test_busy_workers_do_not_spin_on_a_rested_turn() -> None:
    judge, ledger, wake = ScriptedJudge({"a": [JudgeError("x")]}), MemoryLedger().add("a"), CountingEvent()
    judge.asked = {name: asyncio.Event() for name in "abc"}
    async with judging(ledger, judge, wake=wake, pace=Pace(poll_s=1000.0, first_rest_s=0.5)):
        await judge.asked["a"].wait()  # it fails, and rests
        judge.hold = asyncio.Event()
        ledger.add("b", "c")
        wake.set()
        await judge.asked["b"].wait()
        await judge.asked["c"].wait()
        before = wake.clears
        await asyncio.sleep(0.6)  # beyond the rest: both workers are busy, and there is nothing to do but wait for one
        assert wake.clears - before <= 2
        judge.hold.set()
        assert await ledger.until(3) == dict.fromkeys("abc", 1)


async def test_a_bug_climbs() -> None:
    ledger = MemoryLedger().add("a")
    with pytest.raises(ExceptionGroup) as caught:
        await judge_turns(ledger, ScriptedJudge({"a": [KeyError("bug")]}), SETTINGS, asyncio.Event(), pace=FAST)
    assert caught.group_contains(KeyError)


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
                ledger, method, ScoringTools(), asyncio.Event(), sampled=sampled, workers=2, retries=2, pace=FAST
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

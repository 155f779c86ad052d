"""A stage: its wakes and rests, the circuit breaker, and a ledger that cannot write."""

import asyncio

import pytest
from workers import MemoryLedger, ScriptedJudge, judging

from openclaw_rl.errors import JudgeError
from openclaw_rl.scoring import stage as stage_module
from openclaw_rl.scoring.stage import CircuitBreaker, Failed, RetryTimes, Stage, StageLimits
from openclaw_rl.settings import JudgeSettings
from openclaw_rl.types import TurnState


async def test_a_new_turn_wakes_the_worker() -> None:
    ledger, wake = MemoryLedger(), asyncio.Event()
    async with judging(ledger, ScriptedJudge(), wake=wake, times=RetryTimes(poll_s=1000.0)):
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
    async with judging(ledger, judge, times=RetryTimes(poll_s=0.01, first_rest_s=1000.0, longest_rest_s=1000.0)):
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
    async with judging(ledger, judge, wake=wake, times=RetryTimes(poll_s=1000.0, first_rest_s=0.5)):
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


def test_the_breaker_trips_after_three_turns_probes_and_closes() -> None:
    breaker = CircuitBreaker(RetryTimes(first_rest_s=1000.0, longest_rest_s=1000.0))
    assert [breaker.record_failure(name) for name in ("a", "a", "b", "c")] == [False, False, False, True]
    assert breaker.is_open
    assert breaker.excuses("c")
    assert breaker.probed == {"c"}
    assert 20.0 < breaker.rest_s <= 30.0  # the longest pause between probes
    breaker.start_round()
    assert breaker.probed == frozenset()
    assert not breaker.record_failure("a"), "it has tripped"
    excused = [breaker.excuses("a") for _ in range(501)]
    assert excused == [True] * 500 + [False]
    assert breaker.close()
    assert not breaker.is_open
    assert not breaker.close()


def opened() -> CircuitBreaker:
    breaker = CircuitBreaker(RetryTimes())
    for name in ("x", "y", "z"):
        breaker.record_failure(name)
    assert breaker.is_open
    return breaker


def test_a_breaker_knows_a_bounded_number_of_probed_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "_PROBES_OF_ONE_TURN", 1)
    monkeypatch.setattr(stage_module, "_MOST_KNOWN", 3)
    breaker = opened()
    assert breaker.excuses("t0")
    assert not breaker.excuses("t0"), "its probes are used up"
    assert all(breaker.excuses(f"t{n}") for n in (1, 2, 3))
    assert breaker.excuses("t0"), "the oldest of four was forgotten"
    assert not breaker.excuses("t3"), "the newest was not"


def test_an_open_breaker_counts_no_more_failures() -> None:
    breaker = opened()
    assert not any(breaker.record_failure(f"t{n}") for n in range(1000))
    assert breaker.close()
    assert not breaker.record_failure("x"), "it starts from nothing"


async def test_a_stage_knows_a_bounded_number_of_failed_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "_MOST_KNOWN", 3)
    ledger = MemoryLedger().add(*(f"t{n}" for n in range(10)))
    stage = Stage("judge", ledger, TurnState.PAIRED, StageLimits(retries=100), RetryTimes())
    for turn in await ledger.to_judge(10, skip=()):
        # Refused by the ledger: the breaker, which stops other failures, takes no part.
        assert not await stage._fail(turn, Failed("no", is_refused=True))
        assert len(stage._failures) <= 3
    assert list(stage._failures) == ["t7", "t8", "t9"]

"""The LLM judge: votes at once, the first decided majority, failures that stay failures."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from openclaw_rl.errors import JudgeError
from openclaw_rl.judge.judge import Undecided
from openclaw_rl.judge.llm import Answer, LlmJudge
from openclaw_rl.messages import Message
from openclaw_rl.settings import JudgeSettings


@dataclass
class StubAsk:
    """Answers from a list, in order; an exception is raised, an event is waited for."""

    answers: list[str | Answer | Exception | asyncio.Event]
    asked: list[tuple[Sequence[Message], int]] = field(default_factory=list)
    cancelled: int = 0
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a third call has come."""

    async def __call__(self, prompt: Sequence[Message], *, max_new_tokens: int) -> Answer:
        self.asked.append((prompt, max_new_tokens))
        answer = self.answers[len(self.asked) - 1]
        if len(self.asked) == 3:
            self.waiting.set()
        if isinstance(answer, asyncio.Event):
            try:
                await answer.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Answer) else Answer(str(answer), is_cut=False)


def judge(*answers, votes: int = 3, quorum: int = 2) -> tuple[LlmJudge, StubAsk]:
    ask = StubAsk(list(answers))
    return LlmJudge(ask, JudgeSettings(kind="llm", votes=votes, quorum=quorum, max_new_tokens=64)), ask


async def test_the_majority_is_the_verdict(judged) -> None:
    llm, ask = judge(r"\boxed{1}", r"No: \boxed{-1}", r"\boxed{-1}")
    verdict = await llm.verdict(judged("Sort: c a b", "a b c", "now descending"))
    assert (verdict.value, sorted(verdict.votes), verdict.source) == (-1, [-1, -1, 1], "llm")
    assert verdict.rationale.endswith(r"\boxed{-1}")
    prompts = [prompt for prompt, _ in ask.asked]
    assert prompts[0] == prompts[1] == prompts[2]
    assert "now descending" in prompts[0][1].text()


async def test_it_stops_at_the_first_decided_majority(judged) -> None:
    never = asyncio.Event()
    llm, ask = judge(r"\boxed{1}", never, r"\boxed{1}")
    verdict = await llm.verdict(judged())
    assert (verdict.value, verdict.votes, ask.cancelled) == (1, (1, 1), 1)


async def test_zero_is_a_verdict(judged) -> None:
    llm, _ = judge(r"\boxed{0}", r"\boxed{0}", r"\boxed{1}")
    assert (await llm.verdict(judged())).value == 0


async def test_an_outage_is_never_a_zero(judged) -> None:  # JV-3
    llm, _ = judge(JudgeError("503"), JudgeError("timeout"), "I cannot decide, it depends on many things.")
    with pytest.raises(JudgeError, match="0 valid votes"):
        await llm.verdict(judged())
    llm, _ = judge(r"\boxed{1}", JudgeError("503"), "cannot say")
    with pytest.raises(JudgeError, match="503") as caught:
        await llm.verdict(judged())
    assert not isinstance(caught.value, Undecided)  # worth another try later


async def test_a_tie_is_voted_on_once_more(judged) -> None:
    tie = (r"\boxed{1}", r"\boxed{0}", r"\boxed{-1}")
    llm, ask = judge(*tie, r"\boxed{-1}", r"\boxed{-1}", r"\boxed{1}")
    verdict = await llm.verdict(judged())
    assert verdict.value == -1
    assert verdict.votes[:3] == (1, 0, -1)
    llm, ask = judge(*tie, *tie, r"\boxed{1}")
    with pytest.raises(Undecided):
        await llm.verdict(judged())
    assert len(ask.asked) == 6


async def test_a_cut_answer_gets_one_larger_budget(judged) -> None:  # JV-6
    cut = Answer(r"<think>\boxed{1}", is_cut=True)
    llm, ask = judge(cut, r"\boxed{-1}", votes=1, quorum=1)
    assert (await llm.verdict(judged())).value == -1
    assert [budget for _, budget in ask.asked] == [64, 128]
    llm, ask = judge(cut, cut, votes=1, quorum=1)
    with pytest.raises(JudgeError):
        await llm.verdict(judged())


async def test_a_bug_in_the_judge_climbs(judged) -> None:
    llm, _ = judge(KeyError("bug"), r"\boxed{1}", asyncio.Event())
    with pytest.raises(ExceptionGroup) as caught:
        await llm.verdict(judged())
    assert caught.group_contains(KeyError)


async def test_cancelling_the_verdict_cancels_the_votes(judged) -> None:
    never = asyncio.Event()
    llm, ask = judge(never, never, never)
    task = asyncio.create_task(llm.verdict(judged()))
    await ask.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ask.cancelled == 3

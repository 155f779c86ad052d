"""Judge that asks a language model for several independent votes; the majority wins.

A known reaction of the user (an emoji) is the user's own verdict: then the judge does not ask the model. Votes run at
once and stop at the first decided majority. With fewer valid votes than the quorum the judge raises JudgeError, and the
turn may be judged later. After a tie the judge votes once more; a second tie raises `Undecided`. The caller bounds the
number of calls at once: its workers times `votes`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from openclaw_rl.errors import JudgeError, JudgeRefused
from openclaw_rl.judge.judge import Outcome, Undecided, count, parse_vote
from openclaw_rl.judge.pictures import Sight
from openclaw_rl.judge.prompt import judge_prompt
from openclaw_rl.judge.rules import rule_on_reactions
from openclaw_rl.messages import Message
from openclaw_rl.settings import JudgeSettings
from openclaw_rl.types import JudgedTurn, Verdict

RATIONALE_CHARS = 1000
"""Characters of an answer's end that the ledger keeps to explain the verdict."""


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    is_cut: bool
    """It ended at the token limit."""


class JudgeClient(Protocol):
    async def __call__(self, prompt: Sequence[Message], *, max_new_tokens: int) -> Answer:
        """One independent answer. Raises JudgeError."""
        ...


@dataclass(frozen=True, slots=True)
class _Vote:
    value: int | None
    text: str = ""
    error: JudgeError | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class OrText:
    """A client of a judge that may be refused a prompt with pictures: then it asks with the text alone."""

    ask: JudgeClient
    text: Sequence[Message]
    sight: Sight

    async def __call__(self, prompt: Sequence[Message], *, max_new_tokens: int) -> Answer:
        try:
            return await self.ask(prompt, max_new_tokens=max_new_tokens)
        except JudgeRefused:
            if prompt is self.text:
                raise
            self.sight.refused()
            return await self.ask(self.text, max_new_tokens=max_new_tokens)


class LlmJudge:
    def __init__(self, ask: JudgeClient, settings: JudgeSettings, sight: Sight | None = None) -> None:
        """sight: the pictures that the judge gets; None: it reads text alone."""
        self._ask = ask
        self._settings = settings
        self._sight = sight

    async def verdict(self, judged: JudgedTurn) -> Verdict:
        if (ruling := rule_on_reactions(judged.next_state.reactions)) is not None:
            return Verdict(ruling.value, (ruling.value,), source="rules", rationale=ruling.rule)
        prompt: Sequence[Message] = await asyncio.to_thread(judge_prompt, judged)
        ask = self._ask
        if self._sight is not None:
            ask = OrText(ask, prompt, self._sight)
            prompt = await self._sight.shown(judged, prompt, "reply")
        cast: list[_Vote] = []
        for _ in range(2):
            ballot, outcome = await self._ballot(ask, prompt)
            cast += ballot
            if outcome is Outcome.TIE:
                continue
            if isinstance(outcome, Outcome):
                valid = sum(vote.value is not None for vote in ballot)
                error: object = next((vote.error for vote in ballot if vote.error is not None), None)
                if error is None and any(vote.is_cut for vote in ballot):
                    error = f"answers end at their token limit, {2 * self._settings.max_new_tokens}"
                raise JudgeError(
                    f"{valid} valid votes, {self._settings.needed_votes} needed" + (f": {error}" if error else "")
                )
            text = next(vote.text for vote in ballot if vote.value == outcome)
            votes = tuple(vote.value for vote in cast)
            return Verdict(outcome, votes, source="llm", rationale=text[-RATIONALE_CHARS:])
        raise Undecided(f"a tie, twice: {[vote.value for vote in cast]}")

    async def _ballot(self, ask: JudgeClient, prompt: Sequence[Message]) -> tuple[list[_Vote], int | Outcome]:
        votes: list[_Vote] = []
        outcome: int | Outcome = Outcome.OPEN
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._vote(ask, prompt)) for _ in range(self._settings.votes)]
            for done in asyncio.as_completed(tasks):
                votes.append(await done)
                outstanding = self._settings.votes - len(votes)
                outcome = count([v.value for v in votes], outstanding=outstanding, quorum=self._settings.needed_votes)
                if outcome is not Outcome.OPEN:
                    break
            for task in tasks:
                task.cancel()
        return votes, outcome

    async def _vote(self, ask: JudgeClient, prompt: Sequence[Message]) -> _Vote:
        try:
            answer = await asked_again_if_cut(ask, prompt, self._settings.max_new_tokens)
        except JudgeError as error:
            return _Vote(None, error=error)
        return _Vote(parse_vote(answer.text, is_cut=answer.is_cut), answer.text, is_cut=answer.is_cut)


async def asked_again_if_cut(ask: JudgeClient, prompt: Sequence[Message], budget: int) -> Answer:
    """Return the judge's answer; one that `budget` tokens cut is asked for once more with twice as many."""
    answer = await ask(prompt, max_new_tokens=budget)
    return await ask(prompt, max_new_tokens=2 * budget) if answer.is_cut else answer

"""Conversations of one run: sampled replies become turns, a simulated user answers, the method makes samples of them.

From the user's message on, all code is the product's. The rules judge reads the message, `method.score` finds the hint
and asks for the scoring pair, and the turns that it drops are dropped.

A round is all first turns, or first turns and then second ones (`follows_up`). A user who complained then waits for a
better reply and judges it, as in a chat; a content user asks another question. A user who `demonstrates` also sends the
reply that it thanked for after a complaint to `/v1/feedback`, as a demonstration for the turn it complained of.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.learning.engine import ScoringEngine
from benchmarks.learning.fleet import Reply
from benchmarks.learning.subject import Subject
from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.judge.llm import Answer
from openclaw_rl.judge.rules import RulesJudge
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Dropped, Method, ScoringTools
from openclaw_rl.offline.personas import THANKS, Complaint, Preference, Topic
from openclaw_rl.settings import MethodSettings
from openclaw_rl.types import Ids, JudgedTurn, NextState, Request, Sample, SamplingParams, Scope, Turn, VersionRun

CONTEXT = 8192


@dataclass(slots=True)
class Batch:
    """Samples and verdicts of one round of turns."""

    samples: list[Sample] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    rewards: list[int] = field(default_factory=list)
    """The judge's verdicts of all turns."""
    complaints: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Asked:
    """Conversation up to the policy's next reply."""

    topic: Topic
    messages: tuple[str, ...]
    """Messages of the user and the policy in turn; the user's are first and last."""


class Simulation:
    """Simulated user of one run, and the method that learns from it."""

    def __init__(
        self,
        subject: Subject,
        preference: Preference,
        method: Method,
        settings: MethodSettings,
        engine: ScoringEngine,
        *,
        seed: int,
        reads_request: bool,
        demonstrates: bool = False,
    ) -> None:
        self._subject, self._preference, self._method = subject, preference, method
        self._settings, self._engine = settings, engine
        self._reads_request, self._demonstrates = reads_request, demonstrates
        self.in_few_words = False
        """The user complains in few words."""
        self._dice = random.Random(seed)

    def first(self, topics: Sequence[Topic]) -> list[Asked]:
        return [Asked(topic, (self._preference.question(topic),)) for topic in topics]

    def prompts(self, asked: Sequence[Asked]) -> list[Ids]:
        return [self._subject.prompt(*one.messages) for one in asked]

    def said(self, asked: Sequence[Asked], replies: Sequence[Reply]) -> list[str]:
        """Return the user's answer to each reply: thanks, or a complaint in words that are new in this chat."""
        found = []
        for one, reply in zip(asked, replies, strict=True):
            complaint = self.complaint(one.topic, reply)
            ways = THANKS if complaint is None else complaint.ways(in_few_words=self.in_few_words)
            found.append(self._dice.choice([way for way in ways if way not in one.messages] or ways))
        return found

    def second(
        self, asked: Sequence[Asked], replies: Sequence[Reply], said: Sequence[str], fresh: Sequence[Topic]
    ) -> list[Asked]:
        """Return the next questions: the same chat after a complaint, another topic after thanks."""
        following = []
        for one, reply, text, topic in zip(asked, replies, said, fresh, strict=True):
            if text in THANKS:
                following += self.first([topic])
            else:
                following.append(Asked(one.topic, (*one.messages, self._subject.text(reply.ids), text)))
        return following

    async def round(
        self,
        asked: Sequence[Asked],
        replies: Sequence[Reply],
        said: Sequence[str],
        version: int,
        sampling: SamplingParams,
    ) -> Batch:
        batch, turns = Batch(), []
        for n, (one, reply, text) in enumerate(zip(asked, replies, said, strict=True)):
            complaint = self.complaint(one.topic, reply)
            batch.complaints[complaint.name if complaint else "thanks"] += 1
            turns.append((self.turn(f"v{version}-{n}", one, reply, text, version, sampling), complaint))
            if self._demonstrates and complaint is None and len(one.messages) > 1:
                batch.samples.append(self._demonstration(f"v{version}-{n}-demo", one.messages[0], reply, version))
        async with self.scoring(version, places=len(turns)) as tools:
            scored = await asyncio.gather(*(self._scored(turn, complaint, tools) for turn, complaint in turns))
        for judged, outcome in scored:
            batch.rewards.append(judged.verdict.value if judged.verdict else 0)
            if isinstance(outcome, Dropped):
                batch.dropped[f"{outcome.reason}: {outcome.detail}".rstrip(": ")] += 1
            else:
                batch.samples.append(outcome)
        return batch

    @asynccontextmanager
    async def scoring(self, version: int, *, places: int) -> AsyncIterator[ScoringTools[Any]]:
        """Yield the tools of `Method.score` and `Method.practise`, with so many places for calls of the engine."""
        async with self._engine.serves(version) as lora_path:
            serving = VersionAdmission(hold_s=60)
            serving.switch(version, lora_path)
            yield ScoringTools(
                settings=self._settings,
                teacher=self._engine,  # type: ignore[arg-type]
                serving=serving,
                render=self._render,
                context_length=CONTEXT,
                slots=asyncio.Semaphore(places),
            )

    def _demonstration(self, turn_id: str, question: str, reply: Reply, version: int) -> Sample:
        """Return a demonstration as the ledger makes it: behind the prompt of the corrected turn, not sampled there."""
        return Sample(
            sample_id=turn_id,
            prompt_ids=self._subject.prompt(question),
            response_ids=reply.ids,
            loss_mask=(True,) * len(reply.ids),
            rollout_log_probs=(0.0,) * len(reply.ids),
            versions=(VersionRun(version, len(reply.ids)),),
            temperature=1.0,
            is_demonstration=True,
        )

    def complaint(self, topic: Topic, reply: Reply) -> Complaint | None:
        """Return the fault that the user finds in the reply, or None."""
        return self._preference.complaint(
            topic,
            self._subject.text(reply.ids),
            has_ended=reply.ids[-1] == self._subject.end_id,
            reads_request=self._reads_request,
        )

    async def _scored(
        self, turn: JudgedTurn, complaint: Complaint | None, tools: ScoringTools
    ) -> tuple[JudgedTurn, Sample | Dropped]:
        verdict = await RulesJudge().verdict(turn)
        judged = JudgedTurn(turn.request, turn.turn, turn.next_state, verdict)

        async def ask(prompt: Sequence[Message], *, max_new_tokens: int) -> Answer:
            """Judge of `hint_source = "judge"`: return the wish in one canonical sentence."""
            hint = f"\\boxed{{1}}\n[HINT_START]{self._preference.hint}[HINT_END]"
            return Answer(hint if complaint else "\\boxed{-1}", is_cut=False)

        own = ScoringTools(
            settings=tools.settings,
            teacher=tools.teacher,
            serving=tools.serving,
            render=tools.render,
            ask=ask,
            context_length=tools.context_length,
            slots=tools.slots,
            health=tools.health,
        )
        return judged, await self._method.score(judged, own)

    def _render(self, messages: Sequence[Message], tools_json: str | None, kwargs_json: str | None) -> Ids:
        return self._subject.prompt(*(message.text() for message in messages))

    def turn(
        self, turn_id: str, asked: Asked, reply: Reply, said: str | None, version: int, sampling: SamplingParams
    ) -> JudgedTurn:
        """Return the turn as the ledger holds it. said: the user's next message; None: no message followed."""
        roles = ("user", "assistant")
        request = Request(
            request_id=turn_id,
            scope=Scope("user", turn_id),
            received_at=0.0,
            messages=tuple(Message(role=roles[n % 2], content=text) for n, text in enumerate(asked.messages)),
            tools_json=None,
            template_kwargs_json=None,
            prompt_ids=self._subject.prompt(*asked.messages),
            sampling=sampling,
        )
        turn = Turn(
            turn_id=turn_id,
            request_id=turn_id,
            finished_at=0.0,
            response_ids=reply.ids,
            rollout_log_probs=reply.log_probs,
            loss_mask=(True,) * len(reply.ids),
            versions=(VersionRun(version, len(reply.ids)),),
            finish_reason="stop" if reply.ids[-1] == self._subject.end_id else "length",
            reply=Message(role="assistant", content=self._subject.text(reply.ids)),
        )
        following = () if said is None else (Message(role="user", content=said),)
        return JudgedTurn(request, turn, NextState(following))

"""Turns with a next state, a judge that answers from a list, and scoring tools over the fake engine."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from openclaw_opd.settings import OpdSettings
from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.judge.llm import Answer
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import ScoringTools
from openclaw_rl.testing import FakeEngine
from openclaw_rl.types import (
    KEYLESS_USER,
    Feedback,
    Ids,
    JudgedTurn,
    NextState,
    Request,
    SamplingParams,
    Scope,
    Turn,
    Verdict,
    VersionRun,
)


def render(messages: Sequence[Message], tools_json: str | None, template_kwargs_json: str | None) -> Ids:
    """A tokenizer of characters."""
    text = "".join(f"<{message.role}>{message.text()}" for message in messages) + (tools_json or "") + "<assistant>"
    return tuple(map(ord, text))


def make_judged(
    request: str | Sequence[Message] = "Sort these: c a b",
    reply: str = "a b c",
    *next_messages: str | Message,
    verdict: int | None = -1,
    comment: str | None = None,
    turn_id: str = "t",
    mask: tuple[bool, ...] | None = None,
    tools_json: str | None = None,
    user: str = KEYLESS_USER,
) -> JudgedTurn:
    messages = [Message(role="user", content=request)] if isinstance(request, str) else list(request)
    following = [Message(role="user", content=m) if isinstance(m, str) else m for m in next_messages]
    ids = tuple(400 + k for k in range(len(mask or (1, 2, 3))))
    return JudgedTurn(
        request=Request(
            request_id="r",
            scope=Scope(user, "s"),
            received_at=1.0,
            messages=tuple(messages),
            tools_json=tools_json,
            template_kwargs_json=None,
            prompt_ids=render(messages, tools_json, None),
            sampling=SamplingParams(max_new_tokens=8),
        ),
        turn=Turn(
            turn_id=turn_id,
            request_id="r",
            finished_at=2.0,
            response_ids=ids,
            rollout_log_probs=(-0.1,) * len(ids),
            loss_mask=mask or (True,) * len(ids),
            versions=(VersionRun(0, len(ids)),),
            finish_reason="stop",
            reply=Message(role="assistant", content=reply),
        ),
        next_state=NextState(tuple(following)),
        verdict=None if verdict is None else Verdict(verdict, (verdict,), "rules"),
        feedback=() if comment is None else (Feedback("f", turn_id, 3.0, comment=comment),),
    )


@pytest.fixture
def judged() -> Callable[..., JudgedTurn]:
    """`judged(request, reply, *next_state, verdict=…, comment=…)`."""
    return make_judged


@dataclass
class StubAsk:
    """Answers from a list, in order; an exception is raised, an event is waited for."""

    answers: list[str | Answer | Exception | asyncio.Event]
    prompts: list[Sequence[Message]] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    cancelled: int = 0

    async def __call__(self, prompt: Sequence[Message], *, max_new_tokens: int) -> Answer:
        self.prompts.append(prompt)
        self.budgets.append(max_new_tokens)
        answer = self.answers[len(self.prompts) - 1]
        if isinstance(answer, asyncio.Event):
            try:
                await answer.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Answer) else Answer(str(answer), is_cut=False)


@dataclass
class Bench:
    tools: ScoringTools
    ask: StubAsk
    engine: FakeEngine
    serving: VersionAdmission


@pytest.fixture
def bench() -> Callable[..., Bench]:
    """`bench(*answers, context_length=…, engine=…, **method settings)`; the base serves."""

    def make(*answers: object, context_length: int = 8192, engine: FakeEngine | None = None, **method: object) -> Bench:
        engine = engine or FakeEngine()
        serving = VersionAdmission(hold_s=0.05)
        serving.switch(0, None)
        ask = StubAsk(list(answers))  # type: ignore[arg-type]
        tools = ScoringTools(
            settings=OpdSettings.model_validate({"hint_source": "judge", "teacher": "policy"} | method),
            teacher=engine,
            serving=serving,
            render=render,
            ask=ask,
            context_length=context_length,
        )
        return Bench(tools, ask, engine, serving)

    return make


@pytest.fixture
def yes() -> Callable[[str], str]:
    """A judge's answer that holds this hint."""
    return lambda hint: f"They wanted it so.\n\\boxed{{1}}\n[HINT_START]{hint}[HINT_END]"


@pytest.fixture
def no() -> str:
    return r"Nothing to learn. \boxed{-1}"

"""Turns made to order for judges."""

from collections.abc import Callable, Sequence

import pytest

from openclaw_rl.messages import Message
from openclaw_rl.types import JudgedTurn, NextState, Request, SamplingParams, Scope, Turn, VersionRun


def make_judged(
    request: str | Sequence[Message] = "Sort these: c a b",
    reply: str | Message = "a b c",
    *next_messages: str | Message,
    reactions: tuple[str, ...] = (),
) -> JudgedTurn:
    messages = [Message(role="user", content=request)] if isinstance(request, str) else request
    following = [Message(role="user", content=m) if isinstance(m, str) else m for m in next_messages]
    return JudgedTurn(
        request=Request(
            request_id="r",
            scope=Scope("uma", "s"),
            received_at=1.0,
            messages=tuple(messages),
            tools_json=None,
            template_kwargs_json=None,
            prompt_ids=(1, 2),
            sampling=SamplingParams(max_new_tokens=8),
        ),
        turn=Turn(
            turn_id="t",
            request_id="r",
            finished_at=2.0,
            response_ids=(3,),
            rollout_log_probs=(-0.1,),
            loss_mask=(True,),
            versions=(VersionRun(0, 1),),
            finish_reason="stop",
            reply=Message(role="assistant", content=reply) if isinstance(reply, str) else reply,
        ),
        next_state=NextState(tuple(following), reactions),
    )


@pytest.fixture
def judged() -> Callable[..., JudgedTurn]:
    """`judged(request, reply, *next_state, reactions=…)`; strings are users' and the assistant's words."""
    return make_judged

"""What judging and scoring ask with, made of the parts that serve: the server and an offline replay use the same."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import httpx

from openclaw_rl.engines.base import Engine
from openclaw_rl.judge.ask import AskEngine, AskUrl
from openclaw_rl.judge.llm import AskJudge
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Method, Render
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import JudgeSettings, Settings
from openclaw_rl.types import Ids

BACKGROUND_SHARE = 2
"""Judging and scoring take at most the engine's places divided by this, or one each."""


@dataclass(frozen=True, slots=True)
class Places:
    """How many calls of each kind the policy's engine takes at once. None waits for a place that another kind holds: a
    judge writes for a minute where a scoring call is one pass, and hints must not keep verdicts waiting, nor the other
    way round."""

    verdicts: asyncio.Semaphore
    hints: asyncio.Semaphore
    scores: asyncio.Semaphore

    @classmethod
    def of(cls, settings: Settings, method: Method) -> Self:
        """The background's places, shared evenly among the kinds that will come to this engine."""
        asks_here, is_scored = settings.judge.url is None, method.needs_engine
        comes = (
            asks_here and settings.judge.kind == "llm",
            asks_here and is_scored and settings.method.hint_source == "judge",
            is_scored,
        )
        places, kinds = settings.engine.max_running // BACKGROUND_SHARE, sum(comes)
        shares = iter([(places + kinds - 1 - k) // kinds for k in range(kinds)])  # what is left over goes to the first
        return cls(*(asyncio.Semaphore(max(1, next(shares) if is_coming else 0)) for is_coming in comes))


def renderer(frontend: FrontEnd) -> Render:
    """The front end as a method uses it: what the ledger keeps of a request, to ids."""

    def render(messages: Sequence[Message], tools_json: str | None, template_kwargs_json: str | None) -> Ids:
        tools = None if tools_json is None else json.loads(tools_json)
        return frontend.render(messages, tools, json.loads(template_kwargs_json or "{}")).ids

    return render


def judge_model(
    settings: JudgeSettings,
    engine: Engine,
    frontend: FrontEnd,
    *,
    client: httpx.AsyncClient,
    slots: asyncio.Semaphore,
) -> AskJudge:
    """The model behind verdicts or hints: the one at `judge.url`, else the base in the policy's own engine, `slots` of
    whose places it takes."""
    if settings.url is not None:
        return AskUrl(client, settings)
    return AskEngine(
        engine,
        settings,
        render=lambda messages: frontend.render(messages).ids,
        decode=frontend.decode,
        slots=slots,
    )

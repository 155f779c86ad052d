"""What judging and scoring ask with, made of the parts that serve: the server and an offline replay use the same."""

import asyncio
import json
from collections.abc import Sequence

import httpx

from openclaw_rl.engines.base import Engine
from openclaw_rl.judge.ask import AskEngine, AskUrl
from openclaw_rl.judge.llm import AskJudge
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Render
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import JudgeSettings
from openclaw_rl.types import Ids


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
    """The model behind verdicts and hints: the one at `judge.url`, else the base in the policy's own engine."""
    if settings.url is not None:
        return AskUrl(client, settings)
    return AskEngine(
        engine,
        settings,
        render=lambda messages: frontend.render(messages).ids,
        decode=frontend.decode,
        slots=slots,
    )

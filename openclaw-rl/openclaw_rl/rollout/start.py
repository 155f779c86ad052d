"""The workers of one server, made of its parts: who judges, who scores, and with what."""

from contextlib import AsyncExitStack
from functools import partial

import httpx

from openclaw_rl.bells import Bells
from openclaw_rl.core import Core
from openclaw_rl.engines.http import HttpEngine
from openclaw_rl.judge.llm import LlmJudge
from openclaw_rl.judge.rules import RulesJudge
from openclaw_rl.lifetime import Lifetime
from openclaw_rl.methods.base import Method, ScoringTools
from openclaw_rl.rollout.asking import Places, judge_model, renderer
from openclaw_rl.rollout.workers import judge_turns, score_turns
from openclaw_rl.settings import EngineSettings, Settings


def start_judging(
    settings: Settings,
    core: Core,
    method: Method,
    bells: Bells,
    *,
    client: httpx.AsyncClient,
    life: Lifetime,
    stack: AsyncExitStack,
) -> None:
    """From paired turns to samples that wait."""
    places = Places.of(settings, method)
    ask = partial(judge_model, settings.judge, core.engine, core.frontend, client=client)
    is_ruled = settings.judge.kind == "rules"
    judge = RulesJudge() if is_ruled else LlmJudge(ask(slots=places.verdicts), settings.judge)
    tools = ScoringTools(
        settings=settings.method,
        teacher=core.engine,
        base_teacher=_base_teacher(settings.method.teacher_url, stack),
        serving=core.serving,
        render=renderer(core.frontend),
        ask=ask(slots=places.hints),
        context_length=core.context_length,
        slots=places.scores,
        meters=core.meters,
    )
    judging = judge_turns(core.ledger, judge, settings.judge, bells.paired, judged=bells.judged, meters=core.meters)
    scoring = score_turns(
        core.ledger,
        method,
        tools,
        bells.judged,
        sampled=bells.sampled,
        workers=settings.method.score_workers,
        retries=settings.judge.retries,
        max_waiting=settings.training.max_waiting,
    )
    life.own(judging, "judge")
    life.own(scoring, "method")
    life.own(bells.lease_wait.follow(bells.sampled), "samples")


def _base_teacher(url: str | None, stack: AsyncExitStack) -> HttpEngine | None:
    if url is None:
        return None
    engine = HttpEngine(url, settings=EngineSettings(kind="url", url=url))
    stack.push_async_callback(engine.aclose)
    return engine

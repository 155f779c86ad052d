"""The workers between serving and training: a paired turn gets its verdict, a judged one becomes a sample or a reason.

Both loops are owned by the app's TaskGroup. What fails is one turn, not the server: a judge that cannot be asked is
asked again with growing pauses, then the turn goes on without a verdict, and the method decides what to make of it. A
turn whose figures do not align is dropped with that reason. Any other exception is a bug, and climbs to the app. Leaves
to others: which turns, when, and how often again (`stage`).

What judging and scoring ask with, made of the parts that serve: the server and an offline replay use the same.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import httpx
import structlog

from openclaw_rl.engines.base import Engine
from openclaw_rl.errors import AlignmentError, JudgeError, TeacherError
from openclaw_rl.judge.client import EngineJudgeClient, HttpJudgeClient
from openclaw_rl.judge.judge import Judge, Undecided
from openclaw_rl.judge.llm import JudgeClient
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import Dropped, Method, Render, ScoringTools
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.scoring.stage import USUAL_PACE, Failed, Queue, RetryTimes, RolloutLedger, Stage, Write
from openclaw_rl.settings import JudgeSettings, Settings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import DropReason, Ids, JudgedTurn, TurnState, Verdict

log = structlog.get_logger()


async def judge_turns(
    ledger: RolloutLedger,
    judge: Judge,
    settings: JudgeSettings,
    wake: asyncio.Event,
    *,
    judged: asyncio.Event | None = None,
    health: Health | None = None,
    pace: RetryTimes = USUAL_PACE,
) -> None:
    """Give paired turns their verdicts, `settings.workers` at once, until cancelled. `wake` is set when a turn was
    paired; `judged` is set here; `meters` learn whether the judge answers."""
    health = health or Health()

    async def work(turn: JudgedTurn) -> Write:
        turn_id = turn.turn.turn_id
        verdict: Verdict | None = None
        try:
            verdict = await judge.verdict(turn)
        except Undecided as error:
            log.warning("judge_undecided", turn_id=turn_id, error=str(error))
        except JudgeError as error:
            health.failed("judge", str(error))
            raise Failed(str(error), partial(ledger.record_verdict, turn_id, None)) from error
        health.ok("judge")
        return partial(ledger.record_verdict, turn_id, verdict)

    queue = Queue(TurnState.PAIRED, settings.max_waiting)
    stage = Stage("judge", ledger, settings.workers, settings.retries, queue, pace)
    await stage.run(ledger.to_judge, work, wake=wake, done=judged)


async def score_turns(
    ledger: RolloutLedger,
    method: Method,
    tools: ScoringTools,
    wake: asyncio.Event,
    *,
    sampled: asyncio.Event | None = None,
    workers: int = 4,
    retries: int = 5,
    max_waiting: int = 10_000,
    pace: RetryTimes = USUAL_PACE,
) -> None:
    """Make samples of judged turns, until cancelled. `wake` is set when a turn was judged; `sampled` is set here, for
    whoever waits for a batch. `max_waiting`: samples that may wait for a trainer."""

    async def work(turn: JudgedTurn) -> Write:
        turn_id = turn.turn.turn_id
        drop = partial(ledger.drop, turn_id, seen_feedback=len(turn.feedback))
        try:
            made = await method.score(turn, tools)
        except TeacherError as error:
            detail = f"teacher: {error}"
            raise Failed(detail, partial(drop, DropReason.METHOD, detail)) from error
        except AlignmentError as error:  # it would come back at every start, and stop the server each time
            log.error("score_misaligned", turn_id=turn_id, error=str(error))
            made = Dropped(DropReason.MISALIGNED, str(error))
        if isinstance(made, Dropped):
            return partial(drop, made.reason, made.detail)
        return partial(ledger.record_sample, made, seen_feedback=len(turn.feedback))

    stage = Stage("score", ledger, workers, retries, Queue(TurnState.SAMPLED, max_waiting), pace)
    await stage.run(ledger.to_score, work, wake=wake, done=sampled)


BACKGROUND_SHARE = 2
"""Judging and scoring take at most the engine's places divided by this, or one each."""


@dataclass(frozen=True, slots=True)
class ConcurrencyLimits:
    """How many calls of each kind the policy's engine takes at once. None waits for a place that another kind holds: a
    judge writes for a minute where a scoring call is one pass, and hints must not keep verdicts waiting, nor the other
    way round."""

    verdicts: asyncio.Semaphore
    hints: asyncio.Semaphore
    scores: asyncio.Semaphore

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The background's places, shared evenly among the kinds that will come to this engine."""
        asks_here = settings.judge.url is None
        comes = (
            asks_here and settings.judge.kind == "llm",
            asks_here and settings.method.needs_hint_judge,
            settings.method.needs_engine,
        )
        limits, kinds = settings.engine.max_running // BACKGROUND_SHARE, sum(comes)
        shares = iter([(limits + kinds - 1 - k) // kinds for k in range(kinds)])  # what is left over goes to the first
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
) -> JudgeClient:
    """The model behind verdicts or hints: the one at `judge.url`, else the base in the policy's own engine, `slots` of
    whose places it takes."""
    if settings.url is not None:
        return HttpJudgeClient(client, settings)
    return EngineJudgeClient(
        engine,
        settings,
        render=lambda messages: frontend.render(messages).ids,
        decode=frontend.decode,
        slots=slots,
    )

"""Workers between serving and training: a paired turn gets its verdict, a judged turn becomes a sample or is dropped.

The app's TaskGroup owns both loops. A failure costs one turn, not the server. A judge that fails is asked again with
growing pauses; then the turn goes on without a verdict, and the method decides what to make of it. A turn whose figures
do not align is dropped with that reason. An exception that no code foresaw is logged with its traceback. The turn is
then tried again, like any other that failed.

The module also builds the judge's model, the renderer and the engine's concurrency limits from the serving parts. The
server and an offline replay use the same.

Leaves to others: which turns, when, and how often again (`stage`).
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import httpx
import structlog

from openclaw_rl.engines.base import Engine
from openclaw_rl.errors import AlignmentError, JudgeError, TeacherError
from openclaw_rl.judge.client import EngineJudgeClient, HttpJudgeClient
from openclaw_rl.judge.judge import Judge, Unasked, Undecided
from openclaw_rl.judge.llm import JudgeClient
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import HINT_JUDGE, Dropped, Method, Render, ScoringTools
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.scoring.stage import (
    DEFAULT_TIMES,
    Failed,
    RetryTimes,
    RolloutLedger,
    Stage,
    StageLimits,
    Write,
)
from openclaw_rl.sessions.thoughts import has_answer
from openclaw_rl.settings import JudgeSettings, Settings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import DropReason, Ids, JudgedTurn, TurnState, Verdict

log = structlog.get_logger()


_JUDGE = "judge"
"""Name of the judge of verdicts, as a part of the server."""
_LOOK_S = 5.0
"""Pause between two looks for a judge that was away when the server started."""
_NO_ANSWER = "no praise: the reply ended before its answer"
"""Start of the rationale where the user cannot have meant this reply: it got a thought alone, cut by the limit."""
BACKGROUND_SHARE = 2
"""The engine's `max_running` divided by this is the most that judging and scoring take, or one call of each kind."""


async def judge_turns(
    ledger: RolloutLedger,
    judge: Judge,
    settings: JudgeSettings,
    wake: asyncio.Event,
    *,
    judged: asyncio.Event | None = None,
    health: Health | None = None,
    times: RetryTimes = DEFAULT_TIMES,
) -> None:
    """Give paired turns their verdicts, `settings.workers` at once, until cancelled.

    wake: set by others when a turn was paired. judged: set here. health: learns whether the judge answers.
    """
    health = health or Health()

    async def work(turn: JudgedTurn) -> Write:
        turn_id = turn.turn.turn_id
        verdict: Verdict | None = None
        try:
            verdict = await judge.verdict(turn)
        except Unasked:
            return partial(ledger.record_verdict, turn_id, None)
        except Undecided as error:
            log.warning("judge_undecided", turn_id=turn_id, error=str(error))
        except JudgeError as error:
            health.failed(_JUDGE, str(error))
            raise Failed(str(error), partial(ledger.record_verdict, turn_id, None)) from error
        health.ok(_JUDGE)
        if verdict is not None and verdict.value > 0 and not has_answer(turn.turn.reply):
            votes = tuple(None if vote is None else min(vote, 0) for vote in verdict.votes)
            votes = verdict.votes if turn.episode is None else votes  # the mean of a step's votes is its reward
            verdict = replace(verdict, value=0, votes=votes, rationale=f"{_NO_ANSWER}: {verdict.rationale}")
        return partial(ledger.record_verdict, turn_id, verdict)

    limits = StageLimits(settings.workers, settings.retries, settings.max_waiting)
    stage = Stage("judge", ledger, TurnState.PAIRED, limits, times)
    await stage.run(ledger.to_judge, work, wake=wake, done=judged)


async def report_unreached(
    settings: Settings, client: httpx.AsyncClient, health: Health, *, pause_s: float = _LOOK_S
) -> None:
    """Report a judge at a URL as out of order from the start on, until a server answers there."""
    # Without this look the owner would hear of a wrong address after the first turns have failed.
    asked = ((_JUDGE, settings.judge.kind == "llm"), (HINT_JUDGE, settings.method.needs_hint_judge))
    parts = [part for part, is_asked in asked if is_asked]
    if settings.judge.url is None or not parts:
        return
    judge = HttpJudgeClient(client, settings.judge)
    while True:
        try:
            await judge.reach()
        except JudgeError as error:
            for part in parts:
                health.failed(part, str(error), at_once=True)
        else:
            for part in parts:
                health.ok(part)
            return
        await asyncio.sleep(pause_s)


async def score_turns(
    ledger: RolloutLedger,
    method: Method,
    tools: ScoringTools,
    limits: StageLimits,
    wake: asyncio.Event,
    *,
    sampled: asyncio.Event | None = None,
    times: RetryTimes = DEFAULT_TIMES,
) -> None:
    """Make samples of judged turns, until cancelled.

    limits: `max_waiting` bounds the samples that wait for a trainer. wake: set by others when a turn was judged.
    sampled: set here, for the trainer's request that waits for a batch.
    """

    async def work(turn: JudgedTurn) -> Write:
        turn_id = turn.turn.turn_id
        drop = partial(ledger.drop, turn_id, seen_feedback=turn.feedback_ids)
        try:
            made = await method.score(turn, tools)
        except TeacherError as error:
            detail = f"teacher: {error}"
            raise Failed(detail, partial(drop, DropReason.METHOD, detail)) from error
        except AlignmentError as error:  # a bug here would stop the server at every start: the turn comes first again
            log.error("score_misaligned", turn_id=turn_id, error=str(error))
            made = Dropped(DropReason.MISALIGNED, str(error))
        if isinstance(made, Dropped):
            return partial(drop, made.reason, made.detail)
        return partial(ledger.record_sample, made, seen_feedback=turn.feedback_ids)

    stage = Stage("score", ledger, TurnState.SAMPLED, limits, times)
    await stage.run(ledger.to_score, work, wake=wake, done=sampled)


@dataclass(frozen=True, slots=True)
class ConcurrencyLimits:
    """Calls of each kind that the policy's engine takes at once.

    Each kind has slots of its own. A judge writes for a minute where a scoring call is one pass, so verdicts, hints and
    scores must not wait for each other.
    """

    verdicts: asyncio.Semaphore
    hints: asyncio.Semaphore
    scores: asyncio.Semaphore

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Share the background's slots evenly among the kinds of calls that come to this engine."""
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
    """Return a function that renders a request's fields, as the ledger keeps them, to the prompt's ids."""

    def render(messages: Sequence[Message], tools_json: str | None, template_kwargs_json: str | None) -> Ids:
        tools = None if tools_json is None else json.loads(tools_json)
        kwargs = json.loads(template_kwargs_json or "{}")
        return frontend.render(messages, tools, kwargs, shows_pictures=True).ids

    return render


def judge_model(
    settings: JudgeSettings,
    engine: Engine,
    frontend: FrontEnd,
    *,
    client: httpx.AsyncClient,
    slots: asyncio.Semaphore,
) -> JudgeClient:
    """Return the model behind verdicts or hints: the one at `judge.url`, else the base in the policy's engine.

    slots: bounds its calls to the policy's engine.
    """
    if settings.url is not None:
        return HttpJudgeClient(client, settings)
    return EngineJudgeClient(
        engine,
        settings,
        render=lambda messages: frontend.render(messages, shows_pictures=True).ids,
        decode=frontend.decode,
        slots=slots,
        placeholder=None if frontend.vision is None else frontend.vision.placeholder,
    )

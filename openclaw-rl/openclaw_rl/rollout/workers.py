"""The workers between serving and training: a paired turn gets its verdict, a judged one becomes a sample or a reason.

Both loops are owned by the app's TaskGroup. What fails is one turn, not the server: a judge that cannot be asked is
asked again with growing pauses, then the turn goes on without a verdict, and the method decides what to make of it. A
turn whose figures do not align is dropped with that reason. Any other exception is a bug, and climbs to the app. Leaves
to others: which turns, when, and how often again (`stage`).
"""

import asyncio
from functools import partial

import structlog

from openclaw_rl.errors import AlignmentError, JudgeError, TeacherError
from openclaw_rl.judge.judge import Judge, Undecided
from openclaw_rl.meters import Meters
from openclaw_rl.methods.base import Dropped, Method, ScoringTools
from openclaw_rl.rollout.pace import USUAL_PACE, Pace
from openclaw_rl.rollout.stage import Failed, Queue, RolloutLedger, Stage, Write
from openclaw_rl.settings import JudgeSettings
from openclaw_rl.types import DropReason, JudgedTurn, TurnState, Verdict

_log = structlog.get_logger()


async def judge_turns(
    ledger: RolloutLedger,
    judge: Judge,
    settings: JudgeSettings,
    wake: asyncio.Event,
    *,
    judged: asyncio.Event | None = None,
    meters: Meters | None = None,
    pace: Pace = USUAL_PACE,
) -> None:
    """Give paired turns their verdicts, `settings.workers` at once, until cancelled. `wake` is set when a turn was
    paired; `judged` is set here; `meters` learn whether the judge answers."""
    health = meters or Meters()

    async def work(turn: JudgedTurn) -> Write:
        turn_id = turn.turn.turn_id
        verdict: Verdict | None = None
        try:
            verdict = await judge.verdict(turn)
        except Undecided as error:
            _log.warning("judge.undecided", turn_id=turn_id, error=str(error))
        except JudgeError as error:
            health.failed("judge", str(error))
            raise Failed(str(error), partial(ledger.record_verdict, turn_id, None)) from error
        health.worked("judge")
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
    pace: Pace = USUAL_PACE,
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
            _log.error("score.misaligned", turn_id=turn_id, error=str(error))
            made = Dropped(DropReason.MISALIGNED, str(error))
        if isinstance(made, Dropped):
            return partial(drop, made.reason, made.detail)
        return partial(ledger.record_sample, made, seen_feedback=len(turn.feedback))

    stage = Stage("score", ledger, workers, retries, Queue(TurnState.SAMPLED, max_waiting), pace)
    await stage.run(ledger.to_score, work, wake=wake, done=sampled)

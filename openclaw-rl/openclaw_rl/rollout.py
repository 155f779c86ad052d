"""The workers between serving and training: paired turn → verdict → sample.

Both loops are owned by the app's TaskGroup. The ledger is the queue: memory holds the ids of turns in hand and of
those that rest after a failure, everything else is read again. An event wakes a loop, and a slow look at the ledger
finds what no event told.

What fails is one turn, not the server: a judge that cannot be asked is asked again with growing pauses, then the turn
goes on without a verdict, and the method decides what to make of it; a ledger that cannot write makes its worker wait,
with the verdict in hand. Any other exception is a bug, and climbs to the app.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from openclaw_rl.errors import AlignmentError, JudgeError, LedgerError, LedgerUnavailable, TeacherError
from openclaw_rl.judge.judge import Judge, Undecided
from openclaw_rl.meters import Meters
from openclaw_rl.methods.base import Dropped, Method, ScoringTools
from openclaw_rl.settings import JudgeSettings
from openclaw_rl.types import DropReason, JudgedTurn, Sample, Verdict

_log = structlog.get_logger()

Write = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the loops wait; tests shorten it."""

    poll_s: float = 10.0
    """Between two looks at the ledger when nothing wakes the loop."""
    gather_s: float = 0.05
    """From the wake of an idle loop to its look: what wakes it is a chat's request, whose first token goes first."""
    first_rest_s: float = 5.0
    """A turn's pause after its first failure; it doubles with each."""
    longest_rest_s: float = 600.0
    ledger_pause_s: float = 1.0
    """After the ledger failed; it doubles up to `longest_ledger_pause_s`."""
    longest_ledger_pause_s: float = 30.0


USUAL_PACE = Pace()


class RolloutLedger(Protocol):
    """The part of the ledger that the workers use."""

    async def to_judge(self, limit: int, *, skip: Collection[str]) -> list[JudgedTurn]: ...

    async def record_verdict(self, turn_id: str, verdict: Verdict | None) -> None: ...

    async def to_score(self, limit: int, *, skip: Collection[str]) -> list[JudgedTurn]: ...

    async def record_sample(self, sample: Sample, *, seen_feedback: int | None = None) -> None:
        """Not done when the user said more meanwhile than the `seen_feedback` pieces the turn came with; nor is
        `drop`. The turn is taken up again, with all that was said."""
        ...

    async def drop(
        self, turn_id: str, reason: DropReason, detail: str = "", *, seen_feedback: int | None = None
    ) -> None: ...


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
            raise _Failed(str(error), partial(ledger.record_verdict, turn_id, None)) from error
        health.worked("judge")
        return partial(ledger.record_verdict, turn_id, verdict)

    stage = _Stage("judge", ledger, settings.workers, settings.retries, pace)
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
    pace: Pace = USUAL_PACE,
) -> None:
    """Make samples of judged turns, until cancelled. `wake` is set when a turn was judged; `sampled` is set here, for
    whoever waits for a batch."""

    async def work(turn: JudgedTurn) -> Write:
        turn_id = turn.turn.turn_id
        drop = partial(ledger.drop, turn_id, seen_feedback=len(turn.feedback))
        try:
            made = await method.score(turn, tools)
        except TeacherError as error:
            detail = f"teacher: {error}"
            raise _Failed(detail, partial(drop, DropReason.METHOD, detail)) from error
        except AlignmentError as error:  # it would come back at every start, and stop the server each time
            _log.error("score.misaligned", turn_id=turn_id, error=str(error))
            made = Dropped(DropReason.MISALIGNED, str(error))
        if isinstance(made, Dropped):
            return partial(drop, made.reason, made.detail)
        return partial(ledger.record_sample, made, seen_feedback=len(turn.feedback))

    stage = _Stage("score", ledger, workers, retries, pace)
    await stage.run(ledger.to_score, work, wake=wake, done=sampled)


class _Failed(Exception):
    """It may work later; after the last try `give_up` says what becomes of the turn."""

    def __init__(self, detail: str, give_up: Write | None = None) -> None:
        super().__init__(detail)
        self.detail, self.give_up = detail, give_up


class _Stage:
    """One loop: takes turns from the ledger, has at most `workers` of them in work, writes what comes out."""

    def __init__(self, name: str, ledger: RolloutLedger, workers: int, retries: int, pace: Pace) -> None:
        self._name = name
        self._ledger = ledger
        self._workers = workers
        self._retries = retries
        self._pace = pace
        self._busy: set[str] = set()
        self._failures: dict[str, int] = {}
        self._rests_until: dict[str, float] = {}
        """Turns that failed, by monotonic time."""

    async def run(
        self,
        fetch: Callable[..., Awaitable[list[JudgedTurn]]],
        work: Callable[[JudgedTurn], Awaitable[Write]],
        *,
        wake: asyncio.Event,
        done: asyncio.Event | None,
    ) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                wake.clear()
                turns = await self._take(fetch)
                for turn in turns:
                    self._busy.add(turn.turn.turn_id)
                    group.create_task(self._handle(turn, work, wake, done))
                try:
                    async with asyncio.timeout(self._wait_s()):
                        await wake.wait()
                        if not turns:
                            await asyncio.sleep(self._pace.gather_s)
                except TimeoutError:
                    pass

    async def _take(self, fetch: Callable[..., Awaitable[list[JudgedTurn]]]) -> list[JudgedTurn]:
        """As many turns as there are idle workers; waits while the ledger cannot be read."""
        pause_s = self._pace.ledger_pause_s
        while room := self._workers - len(self._busy):
            now = time.monotonic()
            resting = {turn_id for turn_id, until in self._rests_until.items() if until > now}
            try:
                turns = await fetch(room, skip=self._busy | resting)
            except LedgerUnavailable as error:
                _log.error(f"{self._name}.ledger_unavailable", error=str(error), pause_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._pace.longest_ledger_pause_s)
                continue
            if len(turns) < room:  # all there are: who has rested and is not among them has ended elsewhere
                for turn_id in self._rests_until.keys() - self._busy - resting - {turn.turn.turn_id for turn in turns}:
                    self._forget(turn_id)
            return turns
        return []

    async def _handle(
        self,
        turn: JudgedTurn,
        work: Callable[[JudgedTurn], Awaitable[Write]],
        wake: asyncio.Event,
        done: asyncio.Event | None,
    ) -> None:
        turn_id = turn.turn.turn_id
        try:
            try:
                await self._write(await work(turn))
                self._forget(turn_id)
                if done is not None:
                    done.set()
            except _Failed as failure:
                if await self._fail(turn, failure) and done is not None:
                    done.set()
        finally:
            self._busy.discard(turn_id)
            wake.set()

    async def _fail(self, turn: JudgedTurn, failure: _Failed) -> bool:
        """Let the turn rest, or give it up; whether it has left this stage."""
        turn_id, seen = turn.turn.turn_id, len(turn.feedback)
        failures = self._failures[turn_id] = self._failures.get(turn_id, 0) + 1
        rest_s = min(self._pace.first_rest_s * 2 ** min(failures - 1, 20), self._pace.longest_rest_s)
        self._rests_until[turn_id] = time.monotonic() + rest_s
        if failures <= self._retries:
            _log.warning(
                f"{self._name}.failed", turn_id=turn_id, failures=failures, rest_s=rest_s, error=failure.detail
            )
            return False
        _log.error(f"{self._name}.given_up", turn_id=turn_id, failures=failures, error=failure.detail)
        drop = partial(self._ledger.drop, turn_id, DropReason.UNJUDGED, failure.detail, seen_feedback=seen)
        try:
            await self._write(failure.give_up or drop)
        except _Failed as refused:  # the ledger will not end it either: it has ended elsewhere, or goes on resting
            _log.error(f"{self._name}.not_given_up", turn_id=turn_id, error=refused.detail)
            return False
        self._forget(turn_id)
        return True

    async def _write(self, write: Write) -> None:
        """Write, and wait while the ledger cannot. Raises _Failed when it will not: the turn may have moved on."""
        pause_s = self._pace.ledger_pause_s
        while True:
            try:
                return await write()
            except LedgerUnavailable as error:
                _log.error(f"{self._name}.ledger_unavailable", error=str(error), pause_s=pause_s)
            except LedgerError as error:
                raise _Failed(f"not recorded: {error}") from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._pace.longest_ledger_pause_s)

    def _wait_s(self) -> float:
        """Until the next turn has rested enough, at most `poll_s`. With all workers busy, the first to finish wakes."""
        if len(self._busy) >= self._workers:
            return self._pace.poll_s
        rising = [until for turn_id, until in self._rests_until.items() if turn_id not in self._busy]
        return min(self._pace.poll_s, max(min(rising, default=float("inf")) - time.monotonic(), 0.0))

    def _forget(self, turn_id: str) -> None:
        self._failures.pop(turn_id, None)
        self._rests_until.pop(turn_id, None)

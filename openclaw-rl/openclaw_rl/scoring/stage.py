"""One stage of scoring: takes turns from the ledger, works on a few at once, and writes the results.

The ledger is the queue. Memory holds the ids of the turns in work and of those that rest after a failure; the stage
reads all else again. An event wakes the loop, and a slow poll of the ledger finds turns that no event announced.

A turn that fails rests, longer each time, and is given up after its retries. A `CircuitBreaker` tells a judge or a
teacher that is down from single turns that fail. While the ledger cannot write, a worker waits with its result. At most
`max_waiting` turns wait behind the stage: the oldest beyond that end as `backlog`. The server's ledger holds to this in
each transaction; the stage reports it, and does it for a ledger that knows no limit.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import structlog

from openclaw_rl.backoff import Backoff
from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.types import DropReason, JudgedTurn, Sample, TurnState, Verdict

log = structlog.get_logger()

Result = TypeVar("Result")
Write = Callable[[], Awaitable[None]]
Fetch = Callable[..., Awaitable[list[JudgedTurn]]]
Work = Callable[[JudgedTurn], Awaitable[Write]]

_TRIP_AFTER = 3
"""Failed turns in a row, without one that worked, that trip the breaker."""
_MOST_KNOWN = 10_000
"""Failed turns that are known at once. A turn that was forgotten is tried as if it had not failed yet."""
_PROBES_OF_ONE_TURN = 500
"""Probes of one turn while the breaker is open: hours. A turn that always fails does not wait for ever."""


@dataclass(frozen=True, slots=True)
class RetryTimes:
    """Pauses of a stage, in seconds; tests shorten them."""

    poll_s: float = 10.0
    """Between two polls of the ledger when no event wakes the loop."""
    gather_s: float = 0.05
    """From the wake of a loop to its poll, unless turns were left."""  # a chat wakes it: its first token goes first
    first_rest_s: float = 5.0
    """A turn's rest after its first failure; each further failure doubles it."""
    longest_rest_s: float = 600.0
    ledger_pause_s: float = 1.0
    """After the ledger failed; doubled up to `longest_ledger_pause_s`."""
    longest_ledger_pause_s: float = 30.0
    longest_probe_rest_s: float = 30.0
    """Longest pause between two probes while the breaker is open."""

    def turn_rests(self) -> Backoff:
        return Backoff(self.first_rest_s, self.longest_rest_s)

    def probe_rests(self) -> Backoff:
        return Backoff(min(self.first_rest_s, self.longest_probe_rest_s), self.longest_probe_rest_s)

    def ledger_pauses(self) -> Backoff:
        return Backoff(self.ledger_pause_s, self.longest_ledger_pause_s)


DEFAULT_TIMES = RetryTimes()


@dataclass(frozen=True, slots=True)
class StageLimits:
    """Bounds of a stage."""

    workers: int = 4
    """Turns in work at once."""
    retries: int = 5
    """Attempts of one turn after the first."""
    max_waiting: int = 10_000
    """Turns that may wait behind the stage."""


class CircuitBreaker:
    """Tells a judge or teacher that is down from single turns that fail.

    Closed: every turn is taken up. Three failed turns in a row trip the breaker. Open: no failed turn uses up its
    retries, and after each rest one turn is the probe (half-open). The first success closes the breaker.
    """

    def __init__(self, times: RetryTimes) -> None:
        self._rests = times.probe_rests()
        self._next_probe_at = 0.0
        self._failed: set[str] = set()
        """Turns that failed since the last success."""
        self._probes: Counter[str] = Counter()
        self._probed: set[str] = set()
        """Turns probed in this round."""  # each once a round: one that always fails must not keep others waiting

    @property
    def is_open(self) -> bool:
        return len(self._failed) >= _TRIP_AFTER

    @property
    def rest_s(self) -> float:
        """Seconds until the next probe."""
        return max(self._next_probe_at - time.monotonic(), 0.0)

    @property
    def probed(self) -> frozenset[str]:
        """Turns that this round of probes has tried."""
        return frozenset(self._probed)

    def start_round(self) -> None:
        """Start a new round of probes, because every waiting turn was probed."""
        self._probed.clear()

    def record_failure(self, turn_id: str) -> bool:
        """Count a failed turn. Return True if this failure trips the breaker."""
        if self.is_open:
            return False
        self._failed.add(turn_id)
        self._rests.reset()
        return self.is_open

    def excuses(self, turn_id: str) -> bool:
        """Return True if the breaker is open and the failed turn keeps its retries; the turn counts as probed."""
        if not self.is_open:
            return False
        self._probed.add(turn_id)
        self._next_probe_at = time.monotonic() + self._rests.next_s()
        self._probes[turn_id] += 1
        if len(self._probes) > _MOST_KNOWN:  # turns end elsewhere, too
            del self._probes[next(iter(self._probes))]
        return self._probes[turn_id] <= _PROBES_OF_ONE_TURN

    def close(self) -> bool:
        """Close the breaker, because a turn succeeded. Return True if it was open."""
        was_open = self.is_open
        self._failed.clear()
        self._probes.clear()
        self._probed.clear()
        return was_open


class RolloutLedger(Protocol):
    """The part of the ledger that the workers use."""

    async def to_judge(self, limit: int, *, skip: Collection[str]) -> list[JudgedTurn]: ...

    async def record_verdict(self, turn_id: str, verdict: Verdict | None) -> None: ...

    async def to_score(self, limit: int, *, skip: Collection[str]) -> list[JudgedTurn]: ...

    async def record_sample(self, sample: Sample, *, seen_feedback: Collection[str] | None = None) -> None:
        """Record the sample, unless the turn's feedback is no longer that of the ids `seen_feedback`.

        The stage then takes up the turn again, with all feedback. The same holds for `drop`.
        """
        ...

    async def drop(
        self, turn_id: str, reason: DropReason, detail: str = "", *, seen_feedback: Collection[str] | None = None
    ) -> None: ...

    async def drop_oldest(self, state: TurnState, keep: int) -> int:
        """End the oldest turns of a state beyond `keep` as `backlog`. Return how many."""
        ...


class Failed(Exception):
    """Work on a turn failed and may succeed later. After the last retry the stage runs `give_up`.

    is_refused: the ledger refused the result, so the fault is this turn's and not the judge's.
    """

    def __init__(self, detail: str, give_up: Write | None = None, *, is_refused: bool = False) -> None:
        super().__init__(detail)
        self.detail, self.give_up, self.is_refused = detail, give_up, is_refused


@dataclass(slots=True)
class _TurnFailures:
    rests: Backoff
    count: int = 0
    rests_until: float = 0.0
    """Monotonic time."""


class Stage:
    """One loop: takes turns from the ledger, has at most `limits.workers` of them in work, writes the results."""

    def __init__(
        self, name: str, ledger: RolloutLedger, state: TurnState, limits: StageLimits, times: RetryTimes
    ) -> None:
        """state: of the turns that wait behind the stage, bounded by `limits.max_waiting`."""
        self._name, self._ledger, self._state = name, ledger, state
        self._limits, self._times = limits, times
        self._breaker = CircuitBreaker(times)
        self._busy: set[str] = set()
        self._failures: dict[str, _TurnFailures] = {}
        self._bound_checked_at = time.monotonic()

    async def run(self, fetch: Fetch, work: Work, *, wake: asyncio.Event, done: asyncio.Event | None) -> None:
        """Work until cancelled. `wake` announces turns to take up; `done` is set when a turn left the stage."""
        async with asyncio.TaskGroup() as group:
            while True:
                wake.clear()
                room = self._limits.workers - len(self._busy)
                turns = await self._take(fetch)
                for turn in turns:
                    self._busy.add(turn.turn.turn_id)
                    group.create_task(self._handle(turn, work, wake, done))
                try:
                    async with asyncio.timeout(self._wait_s()):
                        await wake.wait()
                        if len(turns) < room:  # all that waited
                            await asyncio.sleep(self._times.gather_s)
                except TimeoutError:
                    pass

    # -- taking turns up -----------------------------------------------------------------------------------------------

    async def _take(self, fetch: Fetch) -> list[JudgedTurn]:
        """Return as many turns as workers are idle; wait while the ledger cannot be read."""
        await self._bound_backlog()
        if self._breaker.is_open:
            return await self._probe(fetch)
        return await self._when_ledger_works(lambda: self._fetch(fetch))

    async def _fetch(self, fetch: Fetch) -> list[JudgedTurn]:
        room = self._limits.workers - len(self._busy)
        if not room:
            return []
        now = time.monotonic()
        resting = {turn_id for turn_id, failures in self._failures.items() if failures.rests_until > now}
        turns = await fetch(room, skip=self._busy | resting)
        if len(turns) < room:  # all that wait: a turn that has rested and is not among them has ended elsewhere
            for turn_id in self._failures.keys() - self._busy - resting - {turn.turn.turn_id for turn in turns}:
                self._forget(turn_id)
        return turns

    async def _probe(self, fetch: Fetch) -> list[JudgedTurn]:
        """Return the next turn to probe, if its time has come."""
        if self._busy or self._breaker.rest_s:
            return []
        try:
            turns = await fetch(1, skip=self._breaker.probed)
        except LedgerUnavailable:
            return []
        if not turns:
            self._breaker.start_round()
        return turns

    def _wait_s(self) -> float:
        """Return the seconds until the next turn has rested, at most `poll_s`."""
        if len(self._busy) >= self._limits.workers:
            return self._times.poll_s  # the first worker to finish wakes the loop
        if self._breaker.is_open:
            return min(self._times.poll_s, self._breaker.rest_s)
        ends = [failures.rests_until for turn_id, failures in self._failures.items() if turn_id not in self._busy]
        return min(self._times.poll_s, max(min(ends, default=float("inf")) - time.monotonic(), 0.0))

    async def _bound_backlog(self) -> None:
        """Drop the oldest turns beyond `max_waiting`."""
        if (now := time.monotonic()) < self._bound_checked_at:
            return
        self._bound_checked_at = now + self._times.poll_s  # not each round: the count costs a read
        try:
            if dropped := await self._ledger.drop_oldest(self._state, self._limits.max_waiting):
                log.warning(f"{self._name}_backlog", dropped=dropped, max_waiting=self._limits.max_waiting)
        except LedgerUnavailable:
            return  # the next worker that writes logs it, and waits

    # -- one turn ------------------------------------------------------------------------------------------------------

    async def _handle(self, turn: JudgedTurn, work: Work, wake: asyncio.Event, done: asyncio.Event | None) -> None:
        turn_id = turn.turn.turn_id
        try:
            try:
                await self._write(await work(turn))
                self._succeed(turn_id)
                has_left = True
            except Failed as failure:
                has_left = await self._fail(turn, failure)
            except Exception as error:  # a fault that no code foresaw costs this turn, and no chat
                log.exception(f"{self._name}_fault", turn_id=turn_id)
                has_left = await self._fail(turn, Failed(f"unexpected {error!r}"))
            if has_left and done is not None:
                done.set()
        finally:
            self._busy.discard(turn_id)
            wake.set()

    def _succeed(self, turn_id: str) -> None:
        self._forget(turn_id)
        if self._breaker.close():
            log.info(f"{self._name}_works_again")
            self._failures.clear()

    async def _fail(self, turn: JudgedTurn, failure: Failed) -> bool:
        """Let the turn rest, or give it up. Return True if it has left this stage."""
        turn_id = turn.turn.turn_id
        if not failure.is_refused:
            if self._breaker.record_failure(turn_id):
                log.warning(f"{self._name}_out", error=failure.detail, turns="wait")
            if self._breaker.excuses(turn_id):
                return False
        failures = self._failures.setdefault(turn_id, _TurnFailures(self._times.turn_rests()))
        if len(self._failures) > _MOST_KNOWN:
            self._forget(next(iter(self._failures)))  # it has most likely ended as backlog
        failures.count += 1
        rest_s = failures.rests.next_s()
        failures.rests_until = time.monotonic() + rest_s
        said = {"turn_id": turn_id, "failures": failures.count, "error": failure.detail}
        if failures.count <= self._limits.retries:
            log.info(f"{self._name}_failed", rest_s=rest_s, **said)
            return False
        log.error(f"{self._name}_given_up", **said)
        try:
            await self._write(failure.give_up or self._drop(turn, failure.detail))
        except Failed as refused:  # the ledger refuses its end too: the turn ended elsewhere, or rests again
            log.error(f"{self._name}_not_given_up", turn_id=turn_id, error=refused.detail)
            return False
        self._forget(turn_id)
        return True

    def _drop(self, turn: JudgedTurn, detail: str) -> Write:
        seen = turn.feedback_ids
        return partial(self._ledger.drop, turn.turn.turn_id, DropReason.UNJUDGED, detail, seen_feedback=seen)

    async def _write(self, write: Write) -> None:
        """Write, and wait while the ledger cannot. Raises Failed when it refuses: the turn may have moved on."""
        try:
            await self._when_ledger_works(write)
        except LedgerError as error:
            raise Failed(f"not recorded: {error}", is_refused=True) from error

    async def _when_ledger_works(self, call: Callable[[], Awaitable[Result]]) -> Result:
        pauses = self._times.ledger_pauses()
        while True:
            try:
                return await call()
            except LedgerUnavailable as error:
                pause_s = pauses.next_s()
                log.error(f"{self._name}_ledger_unavailable", error=str(error), pause_s=pause_s)
                await asyncio.sleep(pause_s)

    def _forget(self, turn_id: str) -> None:
        self._failures.pop(turn_id, None)

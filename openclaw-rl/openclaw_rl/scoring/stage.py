"""One stage of the rollout: turns that stand in the ledger are taken up, a few at once, and what comes out is written.

The ledger is the queue: memory holds the ids of turns in hand and of those that rest after a failure, everything else
is read again. An event wakes the loop, and a slow look at the ledger finds what no event told. A turn that fails rests,
longer each time, and is given up after its retries; where turn after turn fails it is not the turns (`outage`), and
none uses up its tries. A ledger that cannot write makes its worker wait, with the result in hand. What waits behind the
stage is bounded: beyond `max_waiting` the oldest end as `backlog`.

Whether it is single turns that fail, or whoever is asked about them: the judge, the teacher.

While all fail the turns wait, none uses up its tries, and one after the other is tried until one works; then all are
taken up at once.

How long the workers wait: for news, after a failure, for the ledger.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.types import DropReason, JudgedTurn, Sample, TurnState, Verdict


@dataclass(frozen=True, slots=True)
class RetryTimes:
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
    longest_outage_rest_s: float = 30.0
    """Between two tries while everything fails."""


USUAL_PACE = RetryTimes()

_OUT_AFTER = 3
"""Turns that failed one after the other, and nothing worked in between: it is the judge, or the teacher."""
_OUTAGE_TRIES = 500
"""Of one turn while everything fails: hours. Should it be the turns after all, they do not wait for ever."""


class CircuitBreaker:
    def __init__(self, pace: RetryTimes) -> None:
        self._pace = pace
        self._failed: set[str] = set()
        """Turns that failed since anything worked."""
        self._tries: Counter[str] = Counter()
        self._tried: set[str] = set()
        """One after the other, so that none which always fails stands before the rest."""
        self._rest_s = pace.first_rest_s
        self._rests_until = 0.0
        self.is_new = False

    @property
    def is_on(self) -> bool:
        return len(self._failed) >= _OUT_AFTER

    @property
    def rest_s(self) -> float:
        return max(self._rests_until - time.monotonic(), 0.0)

    @property
    def tried(self) -> frozenset[str]:
        return frozenset(self._tried)

    def all_were_tried(self) -> None:
        self._tried.clear()

    def takes(self, turn_id: str) -> bool:
        """A turn failed: whether that is put down to an outage, and not to the turn."""
        was_on = self.is_on
        if not was_on:
            self._failed.add(turn_id)
            self._rest_s = self._pace.first_rest_s
        self.is_new = self.is_on and not was_on
        if not self.is_on:
            return False
        self._tried.add(turn_id)
        self._rests_until = time.monotonic() + self._rest_s
        self._rest_s = min(2 * self._rest_s, self._pace.longest_outage_rest_s)
        self._tries[turn_id] += 1
        return self._tries[turn_id] <= _OUTAGE_TRIES

    def ends(self) -> bool:
        """Something worked; whether that ends an outage."""
        was_on = self.is_on
        self._failed.clear()
        self._tries.clear()
        self._tried.clear()
        return was_on


log = structlog.get_logger()

Write = Callable[[], Awaitable[None]]


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

    async def drop_oldest(self, state: TurnState, keep: int) -> int:
        """End the oldest turns of a state beyond `keep` as `backlog`; how many."""
        ...


class Failed(Exception):
    """It may work later; after the last try `give_up` says what becomes of the turn. `is_refused`: the ledger would not
    have what was made of it, so it is this turn and no other."""

    def __init__(self, detail: str, give_up: Write | None = None, *, is_refused: bool = False) -> None:
        super().__init__(detail)
        self.detail, self.give_up, self.is_refused = detail, give_up, is_refused


@dataclass(frozen=True, slots=True)
class Queue:
    """What a stage keeps bounded."""

    state: TurnState
    max_waiting: int


class Stage:
    """One loop: takes turns from the ledger, has at most `workers` of them in work, writes what comes out."""

    def __init__(
        self, name: str, ledger: RolloutLedger, workers: int, retries: int, queue: Queue, pace: RetryTimes
    ) -> None:
        self._name = name
        self._ledger = ledger
        self._workers = workers
        self._retries = retries
        self._queue = queue
        self._pace = pace
        self._shed_at = time.monotonic()
        self._outage = CircuitBreaker(pace)
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
        await self._shed()
        if self._outage.is_on:
            return await self._take_one(fetch)
        while room := self._workers - len(self._busy):
            now = time.monotonic()
            resting = {turn_id for turn_id, until in self._rests_until.items() if until > now}
            try:
                turns = await fetch(room, skip=self._busy | resting)
            except LedgerUnavailable as error:
                log.error(f"{self._name}_ledger_unavailable", error=str(error), pause_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._pace.longest_ledger_pause_s)
                continue
            if len(turns) < room:  # all there are: who has rested and is not among them has ended elsewhere
                for turn_id in self._rests_until.keys() - self._busy - resting - {turn.turn.turn_id for turn in turns}:
                    self._forget(turn_id)
            return turns
        return []

    async def _take_one(self, fetch: Callable[..., Awaitable[list[JudgedTurn]]]) -> list[JudgedTurn]:
        """While everything fails: the next one to try, when it is time."""
        if self._busy or self._outage.rest_s:
            return []
        try:
            turns = await fetch(1, skip=self._outage.tried)
        except LedgerUnavailable:
            return []
        if not turns:
            self._outage.all_were_tried()
        return turns

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
                if self._outage.ends():
                    log.info(f"{self._name}_works_again")
                    self._rests_until.clear()
                    self._failures.clear()
                if done is not None:
                    done.set()
            except Failed as failure:
                if await self._fail(turn, failure) and done is not None:
                    done.set()
        finally:
            self._busy.discard(turn_id)
            wake.set()

    async def _fail(self, turn: JudgedTurn, failure: Failed) -> bool:
        """Let the turn rest, or give it up; whether it has left this stage."""
        turn_id, seen = turn.turn.turn_id, len(turn.feedback)
        if not failure.is_refused and self._outage.takes(turn_id):
            if self._outage.is_new:
                log.warning(f"{self._name}_out", error=failure.detail, turns="wait")
            return False
        failures = self._failures[turn_id] = self._failures.get(turn_id, 0) + 1
        rest_s = min(self._pace.first_rest_s * 2 ** min(failures - 1, 20), self._pace.longest_rest_s)
        self._rests_until[turn_id] = time.monotonic() + rest_s
        if failures <= self._retries:
            log.info(f"{self._name}_failed", turn_id=turn_id, failures=failures, rest_s=rest_s, error=failure.detail)
            return False
        log.error(f"{self._name}_given_up", turn_id=turn_id, failures=failures, error=failure.detail)
        drop = partial(self._ledger.drop, turn_id, DropReason.UNJUDGED, failure.detail, seen_feedback=seen)
        try:
            await self._write(failure.give_up or drop)
        except Failed as refused:  # the ledger will not end it either: it has ended elsewhere, or goes on resting
            log.error(f"{self._name}_not_given_up", turn_id=turn_id, error=refused.detail)
            return False
        self._forget(turn_id)
        return True

    async def _write(self, write: Write) -> None:
        """Write, and wait while the ledger cannot. Raises Failed when it will not: the turn may have moved on."""
        pause_s = self._pace.ledger_pause_s
        while True:
            try:
                return await write()
            except LedgerUnavailable as error:
                log.error(f"{self._name}_ledger_unavailable", error=str(error), pause_s=pause_s)
            except LedgerError as error:
                raise Failed(f"not recorded: {error}", is_refused=True) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._pace.longest_ledger_pause_s)

    def _wait_s(self) -> float:
        """Until the next turn has rested enough, at most `poll_s`. With all workers busy, the first to finish wakes."""
        if len(self._busy) >= self._workers:
            return self._pace.poll_s
        if self._outage.is_on:
            return min(self._pace.poll_s, self._outage.rest_s)
        rising = [until for turn_id, until in self._rests_until.items() if turn_id not in self._busy]
        return min(self._pace.poll_s, max(min(rising, default=float("inf")) - time.monotonic(), 0.0))

    async def _shed(self) -> None:
        """Now and then: the count costs a read."""
        if (now := time.monotonic()) < self._shed_at:
            return
        self._shed_at = now + self._pace.poll_s
        try:
            if dropped := await self._ledger.drop_oldest(self._queue.state, self._queue.max_waiting):
                log.warning(f"{self._name}_backlog", dropped=dropped, max_waiting=self._queue.max_waiting)
        except LedgerUnavailable:
            return  # the worker that writes next says so, and waits

    def _forget(self, turn_id: str) -> None:
        self._failures.pop(turn_id, None)
        self._rests_until.pop(turn_id, None)

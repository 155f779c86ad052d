"""Driver that walks turns through a ledger as server, judge, method and trainer do, by its public calls alone."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.scale.talk import Session, Talk
from openclaw_rl.ledger import Ledger
from openclaw_rl.trainer_protocol import Commit, Manifest, Probe, Report
from openclaw_rl.types import (
    DropReason,
    Feedback,
    NextState,
    Request,
    Sample,
    SideCount,
    Turn,
    Verdict,
    VersionState,
    WeightKind,
)

T = TypeVar("T")
BATCH, KEPT = 16, 20
WAITING = 0.25
"""Share of the turns that wait for a trainer."""


@dataclass
class Clock:
    """Clock of the ledger. It stops while a turn is walked through."""

    now: float

    def __call__(self) -> float:
        return self.now


_STATES = (VersionState.GATED, VersionState.LOADING, VersionState.SERVING)


class Drive:
    """on_time: called with the name and the seconds of every call. clock: moved on by 20 s a turn."""

    def __init__(
        self,
        ledger: Ledger,
        talk: Talk,
        clock: Clock,
        *,
        on_time: Callable[[str, float], None] | None = None,
    ) -> None:
        self._ledger, self._talk, self._clock, self._on_time = ledger, talk, clock, on_time
        self._turns = self._waiting = self._serving = 0

    async def step(self) -> Session:
        """Write one turn of one session, and all that the previous turn becomes."""
        talk, ledger = self._talk, self._ledger
        self._clock.now += 20
        session, ended = talk.next()
        if ended is not None and ended.turn is not None:
            await self._timed("drop", ledger.drop(ended.turn.turn_id, DropReason.NO_NEXT_STATE))
        asked, before = session.request, session.turn
        request = talk.ask(session, self._clock.now)
        if asked is not None and before is not None:
            next_state = NextState((request.messages[-1],))
            await self._timed("pair", ledger.pair(before.turn_id, next_state, by_request_id=request.request_id))
            await self._judge(asked, before, next_state.is_tool)
        await self._timed("begin", ledger.begin(request))
        turn, key = talk.reply(session, self._serving, self._clock.now)
        await self._timed("finish", ledger.finish(turn, key))
        self._turns += 1
        if self._turns % 5 == 0:
            await ledger.count_side(SideCount(session.user, session.name, "title", 300, 8, 200, self._clock.now))
        if self._waiting >= WAITING * self._turns + BATCH:
            await self.train()
        return session

    async def hang_up(self) -> None:
        """End all sessions: no turn stays open."""
        for session in self._talk.open():
            assert session.turn is not None
            await self._ledger.drop(session.turn.turn_id, DropReason.NO_NEXT_STATE)

    async def train(self) -> None:
        """Train a batch of the oldest, publish the version, and release weights that no request may use."""
        ledger = self._ledger
        lease = await self._timed("lease", ledger.lease(trainer="trainer", n=BATCH, now=True))
        assert lease is not None
        self._waiting -= len(lease.samples)
        probes = [
            Probe(
                prompt_ids=list(sample.prompt_ids[:32]),
                response_ids=list(sample.response_ids[:32]),
                log_probs=list(sample.rollout_log_probs[:32]),
                parent_log_probs=list(sample.rollout_log_probs[:32]),
            )
            for sample in lease.samples[:2]
        ]
        commit = Commit(
            lease_id=lease.lease_id,
            fence=lease.fence,
            parent=lease.parent,
            manifest=Manifest(
                folder=f"versions/v-{lease.fence}", kind=WeightKind.LORA, base_hash="base", sha256=f"{lease.fence:064x}"
            ),
            report=Report(metrics={"loss": 0.5, "kl": 0.01, "grad_norm": 1.25}, probes=probes),
            durable=True,
        )
        number = await self._timed("commit", ledger.commit(commit))
        for state in _STATES:
            await self._timed("version state", ledger.set_version_state(number, state))
        self._serving = number
        needed = await ledger.needed_versions(KEPT)
        for old in [n for n in await ledger.version_folders() if n < number - KEPT and n not in needed]:
            await self._timed("prune weights", ledger.prune_weights(old, KEPT))

    async def _judge(self, request: Request, turn: Turn, is_tool: bool) -> None:
        chance = self._talk.chance()
        value = 0 if chance < 0.1 else 1 if chance < 0.6 else -1
        if value and 0.58 <= chance < 0.62:  # explicit feedback
            said = Feedback(f"f-{turn.turn_id}", turn.turn_id, self._clock.now, value=float(value))
            await self._timed("feedback", self._ledger.record_feedback(said, user=request.scope.user))
        else:
            verdict = Verdict(value, (value, value, None), "rules", "the user moved on")
            await self._timed("verdict", self._ledger.record_verdict(turn.turn_id, verdict))
        if not value:
            await self._timed("drop", self._ledger.drop(turn.turn_id, DropReason.NEUTRAL))
            return
        scored = self._talk.floats(len(turn.response_ids)) if chance > 0.4 else None
        sample = Sample(
            sample_id=turn.turn_id,
            prompt_ids=request.prompt_ids,
            response_ids=turn.response_ids,
            loss_mask=turn.loss_mask,
            rollout_log_probs=turn.rollout_log_probs,
            versions=turn.versions,
            temperature=0.7,
            is_tool_turn=is_tool,
            reward=float(value),
            teacher_log_probs=scored,
            student_log_probs=None if scored is None else turn.rollout_log_probs,
            scored_version=None if scored is None else self._serving,
        )
        await self._timed("sample", self._ledger.record_sample(sample, seen_feedback=None))
        self._waiting += 1

    async def _timed(self, name: str, call: Awaitable[T]) -> T:
        if self._on_time is None:
            return await call
        start = time.perf_counter()
        value = await call
        self._on_time(name, time.perf_counter() - start)
        return value

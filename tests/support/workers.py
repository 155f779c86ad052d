"""A ledger in memory, a judge that goes by a script, and the worker between them."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from openclaw_rl.errors import LedgerError, LedgerUnavailable
from openclaw_rl.messages import Message
from openclaw_rl.scoring.stage import RetryTimes
from openclaw_rl.scoring.workers import judge_turns
from openclaw_rl.settings import JudgeSettings
from openclaw_rl.types import (
    DropReason,
    JudgedTurn,
    NextState,
    Request,
    Sample,
    SamplingParams,
    Scope,
    Turn,
    TurnState,
    Verdict,
    VersionRun,
)

FAST = RetryTimes(
    poll_s=0.02,
    first_rest_s=0.001,
    longest_rest_s=0.005,
    ledger_pause_s=0.001,
    longest_ledger_pause_s=0.002,
    longest_probe_rest_s=0.002,
)
SETTINGS = JudgeSettings(workers=2, retries=2)


def judged_turn(name: str) -> JudgedTurn:
    return JudgedTurn(
        request=Request(
            request_id=f"r-{name}",
            scope=Scope("uma", "s"),
            received_at=1.0,
            messages=(Message(role="user", content="hi"),),
            tools_json=None,
            template_kwargs_json=None,
            prompt_ids=(1, 2),
            sampling=SamplingParams(max_new_tokens=8),
        ),
        turn=Turn(
            turn_id=name,
            request_id=f"r-{name}",
            finished_at=2.0,
            response_ids=(3,),
            rollout_log_probs=(-0.1,),
            loss_mask=(True,),
            versions=(VersionRun(0, 1),),
            finish_reason="stop",
            reply=Message(role="assistant", content="hello"),
        ),
        next_state=NextState((Message(role="user", content="thanks"),)),
    )


@dataclass
class MemoryLedger:
    """The few methods the workers use. `outage` counts calls that still fail; it will not write `refused` turns."""

    waiting: dict[str, JudgedTurn] = field(default_factory=dict)
    ended: dict[str, object] = field(default_factory=dict)
    outage: int = 0
    refused: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def _call(self, turn_id: str | None = None) -> None:
        if self.outage:
            self.outage -= 1
            raise LedgerUnavailable("disk full")
        if turn_id in self.refused:
            raise LedgerError(f"turn {turn_id} cannot become judged")

    async def _take(self, limit: int, *, skip: Collection[str]) -> list[JudgedTurn]:
        await asyncio.sleep(0)
        self._call()
        return [turn for name, turn in self.waiting.items() if name not in skip][:limit]

    to_judge = to_score = _take

    async def _end(self, turn_id: str, what: object) -> None:
        await asyncio.sleep(0)
        self._call(turn_id)
        assert turn_id not in self.ended, "a turn ends once"
        del self.waiting[turn_id]
        self.ended[turn_id] = what
        self.changed.set()

    async def record_verdict(self, turn_id: str, verdict: Verdict | None) -> None:
        await self._end(turn_id, "no verdict" if verdict is None else verdict.value)

    async def record_sample(self, sample: Sample, *, seen_feedback: Collection[str] | None = None) -> None:
        await self._end(sample.sample_id, sample.reward)

    async def drop(
        self, turn_id: str, reason: DropReason, detail: str = "", *, seen_feedback: Collection[str] | None = None
    ) -> None:
        await self._end(turn_id, f"{reason}: {detail}")

    async def drop_oldest(self, state: TurnState, keep: int) -> int:
        self._call()
        dropped = [*self.waiting][: max(0, len(self.waiting) - keep)] if state is TurnState.PAIRED else []
        for name in dropped:
            await self._end(name, "backlog")
        return len(dropped)

    def add(self, *names: str) -> "MemoryLedger":
        self.waiting |= {name: judged_turn(name) for name in names}
        return self

    async def until(self, count: int) -> dict[str, object]:
        """What became of the turns, once `count` of them have ended."""
        async with asyncio.timeout(120):
            while len(self.ended) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.ended


@dataclass
class ScriptedJudge:
    """Per turn a list of what it says; then +1 for ever."""

    script: dict[str, list[int | Exception]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    hold: asyncio.Event | None = None
    asked: dict[str, asyncio.Event] = field(default_factory=dict)
    """Set when the judge is asked about a turn."""

    async def verdict(self, judged: JudgedTurn) -> Verdict:
        name = judged.turn.turn_id
        self.seen.append(name)
        if name in self.asked:
            self.asked[name].set()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await (self.hold.wait() if self.hold else asyncio.sleep(0))
        finally:
            self.at_once -= 1
        said = self.script.get(name, [])
        value = said.pop(0) if said else 1
        if isinstance(value, Exception):
            raise value
        return Verdict(value, (value,), source="scripted")


@asynccontextmanager
async def judging(
    ledger, judge, *, wake=None, judged=None, health=None, times=FAST, settings=SETTINGS
) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        worker = group.create_task(
            judge_turns(ledger, judge, settings, wake or asyncio.Event(), judged=judged, health=health, times=times)
        )
        yield
        worker.cancel()

"""The engines of a pool that one trainer's transfers reach: those that served, or were about to, when it started.

NCCL joins the trainer's ranks and those of all these engines, so a transfer goes to all of them at once.

Promises:

- No transfer begins while one of them is away: the trainer would wait for it, with every chat held.
- An engine that did not take the weights of a transfer gets no request.
- The group is over once an engine outside it is in the pool, and once one of its own was drained or has been away for
  long. It then has another name: the trainer sees it, saves its weights and starts again with the engines of then.
- An engine outside it that needs the trainer's checkpoint to come in ends it too, once for each start of that engine.
- An engine that was waited for in vain takes no part until it is in the pool or has started again.

Leaves to others: holding the chats (`full_swap`), and the way back of an engine. It takes the weights from a folder, as
soon as they are in one (`engines.pool`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.engines.pool_member import Member, Weights, held
from openclaw_rl.errors import CommitRefused, EngineError, EngineGone
from openclaw_rl.publishing.full_swap import FullWeightSwap, SwapTimes

log = structlog.get_logger()

AWAY_S = 120.0
"""Time that an engine may be away before the trainer starts without it."""

_Start = tuple[Member, str, int]
"""One start of an engine: the engine, its URL then, and the number of its starts."""


class TrainerGroup:
    """The group of the trainer that started last."""

    def __init__(self, pool: PooledEngine, *, call_timeout_s: float, away_s: float = AWAY_S) -> None:
        self._pool, self._call_timeout_s, self._away_s = pool, call_timeout_s, away_s
        self._met: dict[Member, tuple[str, int]] | None = None
        """URL and starts of each engine when the trainer met it; None: the group is over, or no trainer has started."""
        self._number = 0
        self._away_at: float | None = None
        """Loop time at which one of them was first seen away; None: all of them are in the pool."""
        self._made_at = time.monotonic()
        self._in_vain, self._asked_for = set[_Start](), set[_Start]()
        """Those that were waited for in vain, and those for which a trainer was asked to write its checkpoint."""

    @property
    def name(self) -> str:
        """Name of the group. It changes when the trainer has to start again."""
        self._look()
        return str(self._number)

    def meet(self, *, waits: bool = True) -> list[str]:
        """Begin a group of the engines that serve or are about to. Return their URLs.

        Raises EngineGone without one, and while an engine has not answered since the server's start; `waits` is False:
        not then.
        """
        now, every = time.monotonic(), [one for one in self._pool.every if not one.is_drained]
        if waits and now - self._made_at < self._away_s and (late := [o.name for o in every if not o.has_answered]):
            raise EngineGone(f"{', '.join(late)} has not answered since the server's start")
        found = {one: _now(one) for one in every if one.is_in or self._may_come_in(one, now)}
        found = found or {one: _now(one) for one in every if one.answers}
        if not found:
            raise EngineGone("no engine of the pool answers")
        self._met, self._away_at = found, None
        return [one.url for one in found]

    def _may_come_in(self, one: Member, now: float) -> bool:
        return one.answers and now - one.answers_since < self._away_s and (one, *_now(one)) not in self._in_vain

    async def receive(
        self, as_one: FullWeightSwap, weight_version: int, transfer: Callable[[], Awaitable[None]]
    ) -> SwapTimes:
        """Let the trainer send weights to every engine of the group, while chats are held.

        Raises CommitRefused if it would not reach them all: the old weights then serve on. Else raises as
        `FullWeightSwap.receive`.
        """
        async with self._pool.rolling():  # no engine comes in meanwhile
            self.check()
            # Checked again once the engines are empty: one may have died meanwhile.
            return await as_one.receive(weight_version, lambda: self._send(weight_version, transfer), self.check)

    def check(self) -> None:
        """Raise CommitRefused if a transfer would not reach every engine of the group, or miss another one."""
        self._look()
        if self._met is None:
            self._number += 1  # its trainer may have read the name since the group ended
            raise CommitRefused("the engines of the pool are others now: meet them anew")
        if away := self._away(self._met):
            raise CommitRefused(f"{', '.join(one.name for one in away)} is away, and takes part in each transfer")

    async def _send(self, weight_version: int, transfer: Callable[[], Awaitable[None]]) -> None:
        members = self._pool.members
        for member in members:
            member.is_unsure = True
        await transfer()
        for member in members:
            await self._confirm(member, weight_version)
        if not self._pool.members:
            raise EngineGone(f"no engine says that it holds version {weight_version}")
        self._pool.hold(Weights(None, weight_version))

    async def _confirm(self, member: Member, weight_version: int) -> None:
        """Ask one engine for its version; without the right one it leaves the pool."""
        if not member.is_in:
            return
        try:
            async with asyncio.timeout(self._call_timeout_s):
                holds = held(await member.engine.model_info())
        except (EngineError, TimeoutError) as error:
            member.failed(str(error) or "it did not answer after a transfer")
            return
        if holds == weight_version:
            member.is_unsure, member.weight_version = False, weight_version
        else:
            member.leave(f"version {weight_version} was sent, and it says that it holds {holds}")
            self._is_over(member.fault)

    def _look(self) -> None:
        """End the group if it is over."""
        if self._met is not None and (reason := self._end(self._met)) is not None:
            self._is_over(reason)

    def _is_over(self, reason: str) -> None:
        log.warning("trainer_starts_again", reason=reason)
        self._met, self._number = None, self._number + 1

    @staticmethod
    def _away(met: dict[Member, tuple[str, int]]) -> list[Member]:
        return [one for one, then in met.items() if not one.is_in or _now(one) != then]

    def _end(self, met: dict[Member, tuple[str, int]]) -> str | None:
        """Return the reason that the group is over; None: it is not."""
        for member in self._pool.every:
            if member.is_drained:
                if member in met:
                    return f"{member.name} was drained"
            elif met.get(member) != _now(member) and (reason := self._wants_in(member)):
                return reason
        if not (away := self._away(met)):
            self._away_at = None
            return None
        now = asyncio.get_running_loop().time()
        self._away_at = now if self._away_at is None else self._away_at
        if now - self._away_at < self._away_s:
            return None
        self._in_vain.update((one, *_now(one)) for one in away)
        return f"{', '.join(one.name for one in away)} is away for {now - self._away_at:.0f} s"

    def _wants_in(self, member: Member) -> str | None:
        """Return the reason that an engine outside the group ends it; None: it does not."""
        if member.is_in:
            return f"{member.name} is in the pool, and no transfer reaches it"
        held, start = self._pool.weights, (member, *_now(member))
        if member.answers and held is not None and held.folder is None and start not in self._asked_for:
            self._asked_for.add(start)
            return f"{member.name} answers, and needs a checkpoint of version {held.weight_version}"
        return None


def _now(member: Member) -> tuple[str, int]:
    return member.url, member.starts

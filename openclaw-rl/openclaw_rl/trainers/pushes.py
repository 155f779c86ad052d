"""A trainer that sends full weights to the engine itself, from the server's side: `push/begin` → it sends → `push/end`.

Promises: between the two calls nobody asks the engine anything, and chats wait at the gate; one push at a time. A
trainer that dies in between costs `deadline_s`, or less when it starts again: the engine may then hold half a version,
so the gate stays shut until the keeper has restored what should serve, or a trainer has sent it again.

Leaves to others: whether the version may serve, the swap and the self-test (`publishing.pushed_weights`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from openclaw_rl.errors import AlignmentError, CommitRefused, EngineError, EngineGone, LedgerError
from openclaw_rl.trainers.api import PushBegin, PushEnd

log = structlog.get_logger()

TakePushed = Callable[[int, Callable[[], Awaitable[None]]], Awaitable[None]]
"""`PushedWeights.take`."""


@dataclass(frozen=True, slots=True)
class _Push:
    asked: PushBegin
    begun: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TrainerPushes:
    def __init__(self, take_pushed: TakePushed) -> None:
        self._take_pushed = take_pushed
        self._waiting: asyncio.Queue[_Push] = asyncio.Queue(maxsize=1)  # full: a second trainer, refused
        self._now: _Push | None = None

    async def begin(self, asked: PushBegin) -> None:
        """Returns when the engine is empty and the gate shut. Raises CommitRefused when this version may not serve, or
        another push is on its way; EngineError."""
        push = _Push(asked)
        try:
            self._waiting.put_nowait(push)
        except asyncio.QueueFull:
            raise CommitRefused("another push is waiting") from None
        # Shielded: a caller that hangs up while it waits must not leave a push that nobody knows of half begun.
        await asyncio.shield(push.begun)

    async def end(self, said: PushEnd) -> None:
        """Returns when the version serves. Raises CommitRefused when no such push is on its way or the self-test
        refused it, EngineError when it broke off."""
        push = self._now
        if push is None or push.asked.weight_version != said.weight_version or not push.begun.done():
            raise CommitRefused(f"no push of version {said.weight_version} is on its way: its deadline may be over")
        if push.sent.done():  # said again
            pass
        elif said.failure is None:
            push.sent.set_result(None)
        else:
            push.sent.set_exception(EngineGone(said.failure))
        await asyncio.shield(push.done)

    def give_up(self, reason: str) -> None:
        """Its trainer is known to be gone: nobody waits for the deadline."""
        push = self._now
        if push is not None and push.begun.done() and not push.sent.done():
            push.sent.set_exception(EngineGone(reason))

    async def run(self) -> None:
        """One push after the other, forever. Owned by the app."""
        while True:
            self._now = push = await self._waiting.get()
            try:
                await self._take_pushed(push.asked.weight_version, lambda push=push: self._transfer(push))  # type: ignore[misc]
                push.done.set_result(None)
            except (EngineError, AlignmentError, LedgerError, CommitRefused, TimeoutError) as error:
                log.warning("push_failed", weight_version=push.asked.weight_version, error=str(error))
                self._fail(push, error)
            finally:
                self._now = None
                for future in (push.begun, push.sent, push.done):
                    future.cancel()

    @staticmethod
    async def _transfer(push: _Push) -> None:
        push.begun.set_result(None)
        try:
            async with asyncio.timeout(push.asked.deadline_s):
                await push.sent
        except TimeoutError as error:
            raise EngineGone(f"the trainer did not say within {push.asked.deadline_s:g} s that it was done") from error

    @staticmethod
    def _fail(push: _Push, error: Exception) -> None:
        """Whoever waits learns it; nobody may be there any more."""
        for future in (push.begun, push.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # looked at: not every push has a caller at this end

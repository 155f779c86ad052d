"""Versions that are on no disk: their trainer sends them to the engine itself, and says when (slime's driver does).

Whether one may serve is decided before anything is sent, for nothing of the old weights is left behind a push: the
gate's figures, and that the engine has numbers at all. What fails once the new weights are there shuts the gate, and
the keeper restores what should serve.

Leaves to others: the two calls of a push and its deadline (`trainers.pushes`), the swap itself (`full_weights`).

A trainer that sends full weights to the engine itself, from the server's side: `push/begin` → it sends → `push/end`.

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
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing import publication
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.gate import Gate
from openclaw_rl.publishing.version_folders import is_remote_only
from openclaw_rl.telemetry.alerts import Alert
from openclaw_rl.trainer_protocol import PushBegin, PushEnd, Tip
from openclaw_rl.types import VersionState

log = structlog.get_logger()


class PushedWeights:
    def __init__(self, ledger: Ledger, policy: PolicyEngine, gate: Gate, turn: asyncio.Lock, *, alert: Alert) -> None:
        """turn: the publisher's. One swap at a time."""
        self._ledger, self._policy, self._gate, self._turn, self._alert = ledger, policy, gate, turn, alert

    async def describe(self, tip: Tip) -> Tip:
        """Whether its trainer should send it to the engine, and which engine that is."""
        version = await self._ledger.version(tip.weight_version)
        is_missing = self._policy.missed == version.weight_version or version.state is not VersionState.SERVING
        wants = is_remote_only(version) and is_missing
        wants = wants and await self._ledger.pinned() in (None, version.weight_version)
        return tip.model_copy(update={"wants_push": wants, "engine": self._policy.name})

    async def take(self, weight_version: int, transfer: Callable[[], Awaitable[None]]) -> None:
        """Serve the tip with the weights that its trainer sends to the engine while `transfer` runs; what serves may be
        sent again. Raises CommitRefused when it may not serve, EngineError when it does not. What broke off on the way
        leaves the gate shut until the keeper has restored what should serve.
        """
        async with self._turn:
            version = await self._ledger.version(weight_version)
            if (tip := (await self._ledger.tip()).weight_version) != weight_version:
                raise CommitRefused(f"version {weight_version} is not the tip, {tip} is")
            if (pinned := await self._ledger.pinned()) not in (None, weight_version):
                raise CommitRefused(f"version {pinned} is pinned")
            await self._policy.check_is_the_same()
            report = version.report
            if version.state is VersionState.CANDIDATE:
                refusal = (await self._gate.check(version, report)).refusal
                if refusal is not None:
                    await publication.reject(self._ledger, weight_version, refusal, alert=self._alert)
                    raise CommitRefused(refusal)
            await publication.to_loading(self._ledger, version)
            await self._gate.needs_numbers(report.probes)
            await self._policy.receive(weight_version, transfer)
            refusal = await self._gate.self_test(weight_version, report.probes)
            if refusal is not None:
                self._policy.mark_untrusted()
                if version.state is not VersionState.SERVING:
                    await publication.reject(self._ledger, weight_version, refusal, alert=self._alert)
                raise CommitRefused(refusal)
            await self._ledger.set_version_state(weight_version, VersionState.SERVING)
            older = [version.weight_version for version in await self._ledger.unfinished_versions()]
            await publication.supersede(self._ledger, [number for number in older if number < weight_version])
            log.info("published", weight_version=weight_version, parent=version.parent)


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

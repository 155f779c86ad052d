"""Weight pushes: a trainer brings full weights itself, *push/begin → transfer → push/end*.

A version that is not durable is on no disk: only its trainer (slime's driver) has the weights. The server decides
before the transfer whether the version may serve, because a push overwrites the old weights.

A trainer either sends the weights to the engines, or writes them into a folder. From a folder the server gives them to
the engines after `push/end`, as it gives them those of a checkpoint: a pool of engines then takes them in turns.

Promises:

- Between the two calls of a trainer that sends, the engines get no other request, and chats wait at the hold. One push
  runs at a time.
- While a trainer writes files, no lock is held: chats, a rollback, a pin and an engine that is back wait for no file.
  What was checked before is checked again behind them.
- A trainer that dies between the calls costs `deadline_s`, or less if it starts again. The engine may then hold half a
  version: the hold stays until `EngineReadiness` has restored the right version, or a trainer has sent it again.
- A version that the gate refuses after the transfer leaves chats held too, until `EngineReadiness` has restored the
  right version.

Leaves to others: the swap itself (`full_swap`), the tests (`gate`).
"""

import asyncio
from dataclasses import dataclass, field

import structlog

from openclaw_rl.engines.admission import Closed
from openclaw_rl.errors import AlignmentError, CommitRefused, EngineError, EngineGone, LedgerError
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing import publication
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.gate import BeforeSwap, Gate
from openclaw_rl.publishing.version_folders import is_remote_only
from openclaw_rl.telemetry.alerts import Alert
from openclaw_rl.trainer_protocol import PushBegin, PushEnd, Tip
from openclaw_rl.types import Version, VersionState

log = structlog.get_logger()


BEGIN_S = 150.0
"""Longest wait of a trainer for the gate and an empty engine; less than its call waits (`trainers.client`)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Push:
    asked: PushBegin
    begun: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the engine is empty and held."""
    sent: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the trainer ended its transfer."""
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the version serves."""

    @property
    def is_given_up(self) -> bool:
        """True if nobody waits for its begin any more."""
        return self.begun.cancelled() or (self.begun.done() and self.begun.exception() is not None)

    def give_up(self, reason: str) -> None:
        """End it, if it has not begun or its transfer runs."""
        waits = self.sent if self.begun.done() else self.begun
        if not waits.done():
            waits.set_exception(EngineGone(reason))
            waits.exception()  # retrieved: the call that waits may have gone


class TrainerPushes:
    """Runs the pushes that the trainer API asks for, one after the other."""

    def __init__(self, ledger: Ledger, policy: PolicyEngine, gate: Gate, swap: asyncio.Lock, *, alert: Alert) -> None:
        """swap: the publisher's lock, so that one swap runs at a time."""
        self._ledger, self._policy, self._gate, self._swap, self._alert = ledger, policy, gate, swap, alert
        self._begin_s = BEGIN_S
        self._waiting: asyncio.Queue[_Push] = asyncio.Queue(maxsize=1)  # full: the push of a second trainer is refused
        self._now: _Push | None = None
        self._asked = list[_Push]()
        """Those that wait, and the one that runs."""

    def meet(self, writes_files: bool) -> list[str] | None:
        """Note that a trainer starts, as `PolicyEngine.meet`."""
        return self._policy.meet(writes_files)

    async def describe(self, tip: Tip) -> Tip:
        """Add to the tip whether its trainer should send it, whether chats wait for it, and the engine's name."""
        version = await self._ledger.version(tip.weight_version)
        is_missing = self._policy.missed == version.weight_version or version.state is not VersionState.SERVING
        wants = is_remote_only(version) and is_missing
        wants = wants and await self._ledger.pinned() in (None, version.weight_version)
        holds = is_remote_only(version) and self._policy.serving.is_closed_for(Closed.ENGINE)
        return tip.model_copy(update={"wants_push": wants, "engine": self._policy.name, "holds_chats": holds})

    async def begin(self, asked: PushBegin) -> None:
        """Begin a push; return when the engine is empty and held.

        Raises CommitRefused when this version may not serve or another push is waiting, and EngineError.
        """
        for before in self._asked:
            if before.asked.weight_version == asked.weight_version:
                before.give_up("its trainer begins it anew")  # the answer to its first call was lost: no transfer comes
        push = _Push(asked)
        try:
            self._waiting.put_nowait(push)
        except asyncio.QueueFull:
            raise CommitRefused("another push is waiting") from None
        self._asked.append(push)
        # Shielded: a caller that disconnects while it waits must not leave a push half begun.
        try:
            async with asyncio.timeout(self._begin_s):
                await asyncio.shield(push.begun)
        except TimeoutError as error:
            # A gate that takes longer than the trainer waits would hold the chats for a transfer that never comes.
            push.begun.cancel()
            raise EngineGone(f"the push was not begun within {self._begin_s:g} s") from error

    async def end(self, said: PushEnd) -> None:
        """End a push; return when the version serves.

        Raises CommitRefused when no such push is running or the gate refused it, EngineError when it failed.
        """
        push = self._now
        if push is None or push.asked.weight_version != said.weight_version or not push.begun.done():
            raise CommitRefused(f"no push of version {said.weight_version} is on its way: its deadline may be over")
        if push.sent.done():  # a repeated call
            pass
        elif said.failure is None:
            push.sent.set_result(None)
        else:
            push.sent.set_exception(EngineGone(said.failure))
        await asyncio.shield(push.done)

    def give_up(self, reason: str) -> None:
        """End every push that waits or transfers before its deadline, because its trainer is known to be gone."""
        for push in self._asked:
            push.give_up(reason)

    async def run(self) -> None:
        """Run one push after the other until cancelled. The app owns this task."""
        while True:
            self._now = push = await self._waiting.get()
            try:
                await self._serve(push)
                push.done.set_result(None)
            except (EngineError, AlignmentError, LedgerError, CommitRefused, TimeoutError) as error:
                log.warning("push_failed", weight_version=push.asked.weight_version, error=str(error))
                self._fail(push, error)
            finally:
                self._now = None
                self._asked.remove(push)
                for future in (push.begun, push.sent, push.done):
                    future.cancel()

    async def _serve(self, push: _Push) -> None:
        """Serve the tip with the weights that its trainer sends; the serving version may be sent again.

        Raises CommitRefused when it may not serve, EngineError when the push failed. A push that fails after its
        transfer began leaves the engine held.
        """
        if (folder := push.asked.folder) is None:
            async with self._swap:
                version, before = await self._checked(push)
                await self._policy.receive(version.weight_version, lambda: self._transfer(push))
                await self._finish(version, before, None)
            return
        try:
            self._policy.expect_files(folder)
            async with self._swap:
                await self._checked(push)
            await self._transfer(push)  # a rollback, a pin or an engine that is back waits for no files
            async with self._swap:
                version, before = await self._checked(push)
                old = await self._ledger.version(self._policy.serving.current)
                await self._policy.take(version, folder)
                await self._finish(version, before, old)
        finally:
            self._policy.expect_files(None)

    async def _checked(self, push: _Push) -> tuple[Version, BeforeSwap]:
        """Return a version that may serve now, and the numbers of the weights that it will replace.

        Raises CommitRefused, EngineError.
        """
        weight_version = push.asked.weight_version
        if push.is_given_up:
            raise EngineGone("its trainer waits no longer")
        version = await self._ledger.version(weight_version)
        if (tip := (await self._ledger.tip()).weight_version) != weight_version:
            raise CommitRefused(f"version {weight_version} is not the tip, {tip} is")
        if (pinned := await self._ledger.pinned()) not in (None, weight_version):
            raise CommitRefused(f"version {pinned} is pinned")
        await self._policy.check_is_the_same()
        if version.state is VersionState.CANDIDATE:
            refusal = (await self._gate.check(version, version.report)).refusal
            if refusal is not None:
                await publication.reject(self._ledger, weight_version, refusal, alert=self._alert)
                raise CommitRefused(refusal)
        await publication.to_loading(self._ledger, version)
        before = await self._gate.before_swap(version)
        if push.is_given_up:
            raise EngineGone("its trainer waits no longer")
        return version, before

    async def _finish(self, version: Version, before: BeforeSwap, old: Version | None) -> None:
        """Test the version that the engines took, and make it the serving one. Raises CommitRefused.

        old: the one from before, to go back to; None: its weights are gone.
        """
        weight_version = version.weight_version
        refusal = await self._gate.after_swap(version, before)
        if refusal is not None:
            if old is None or old.weight_version == weight_version:
                self._policy.mark_untrusted()
            else:
                await self._policy.go_back(old)
            if version.state is not VersionState.SERVING:
                await publication.reject(self._ledger, weight_version, refusal, alert=self._alert)
            raise CommitRefused(refusal)
        await self._ledger.set_version_state(weight_version, VersionState.SERVING)
        older = [version.weight_version for version in await self._ledger.unfinished_versions()]
        await publication.supersede(self._ledger, [number for number in older if number < weight_version])
        await self._policy.note_files(version)
        log.info("published", weight_version=weight_version, parent=version.parent)

    @staticmethod
    async def _transfer(push: _Push) -> None:
        """Let the trainer send. Raises EngineGone after its deadline."""
        if push.is_given_up:
            raise EngineGone("its trainer waits no longer")
        push.begun.set_result(None)
        try:
            async with asyncio.timeout(push.asked.deadline_s):
                await push.sent
        except TimeoutError as error:
            raise EngineGone(f"the trainer did not say within {push.asked.deadline_s:g} s that it was done") from error

    @staticmethod
    def _fail(push: _Push, error: Exception) -> None:
        """Hand the error to the calls that wait."""
        for future in (push.begun, push.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: a caller may have disconnected, and asyncio would log the error

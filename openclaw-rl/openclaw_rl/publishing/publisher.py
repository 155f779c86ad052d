"""The publisher: commits become served versions. It decides which version serves, and when the next one is tried.

It alone moves a version's state, and finishes at a restart what the ledger says was begun. A failure leaves the version
that serves serving. Requests never wait for an adapter: new ones take the new name, running ones finish, and an adapter
is let go once nobody uses it. A version that is not durable is on no disk: its trainer sends it (`pushed`).

Leaves to others: one version's way to serving (`publication`), what the engine holds (`policy_engine`).
"""

import asyncio
from collections.abc import Sequence

import structlog

from openclaw_rl.errors import AlignmentError, EngineError, LedgerError
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing import publication, version_folders
from openclaw_rl.publishing.canary import Canary
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.gate import Gate, GateResult
from openclaw_rl.publishing.publication import Publication
from openclaw_rl.publishing.version_folders import is_remote_only
from openclaw_rl.publishing.weight_push import TrainerPushes
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.telemetry.alerts import Alert
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import Version, VersionState

log = structlog.get_logger()

RETRY_S = 2.0


class Publisher:
    def __init__(
        self,
        ledger: Ledger,
        policy: PolicyEngine,
        settings: PublisherSettings,
        *,
        health: Health | None = None,
        canaries: Sequence[Canary] = (),
        alert: Alert = log.error,
    ) -> None:
        """health: learns whether versions can be published."""
        self._ledger, self._policy, self._settings = ledger, policy, settings
        self._serving, self._adapters = policy.serving, policy.adapters
        self._health = health or Health()
        self._wake = asyncio.Event()
        self._swap = asyncio.Lock()  # one swap at a time: a rollback waits for a publish, and a publish for a rollback
        self._gate = Gate(
            ledger, policy.serving, policy.score, settings, canaries=canaries, alert=alert, health=self._health
        )
        self._publication = Publication(
            ledger, policy, self._gate, prewarm_sessions=settings.prewarm_sessions, alert=alert
        )
        self.pushes = TrainerPushes(ledger, policy, self._gate, self._swap, alert=alert)

    @property
    def last_gate(self) -> GateResult | None:
        return self._gate.last

    def wake(self) -> None:
        """A commit, a pin or a rollback happened."""
        self._wake.set()

    async def restore(self) -> None:
        """Serve what the ledger says serves: at start, and after the engine was away and may have come back empty.
        Raises EngineError; RemoteOnlyWeights when only its trainer has it.
        """
        async with self._swap:
            await self._policy.restore(await self._target(), self._ledger.version)

    async def is_in_place(self) -> bool:
        """Whether the engine still holds the version that serves."""
        return await self._policy.is_in_place()

    async def wait_for_engine(self) -> None:
        """The engine is not there to `restore`: chats wait for the version that is to serve."""
        self._policy.expect(await self._target())

    async def run(self) -> None:
        """Publish whatever waits, forever. Owned by the app."""
        while True:
            self._wake.clear()
            try:
                await self._reconcile()
                while await self._publish_next():
                    pass
                await self._serve_tip()
                await self._prune()
                if await self._retire_idle():
                    continue  # a version may have waited for the place
            except (EngineError, AlignmentError, LedgerError, TimeoutError) as error:
                log.debug("publish_delayed", error=repr(error), retry_s=RETRY_S)
                if self._serving.is_open:  # else it is known that the engine is down
                    self._health.failed("publisher", repr(error))
                await asyncio.sleep(RETRY_S)
                continue
            self._health.ok("publisher")
            try:
                async with asyncio.timeout(RETRY_S if self._draining() else 3600):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def pin(self, weight_version: int | None) -> None:
        """Serve this version from now on and publish nothing; None: go on publishing. Raises LedgerError when it never
        passed the gate, EngineError; then nothing has changed.
        """
        if weight_version is None:
            await self._ledger.set_pin(None)
        else:
            async with self._swap:
                await self._ledger.check_pinnable(weight_version)
                await self._serve_again(await self._ledger.version(weight_version))
                await self._ledger.set_pin(weight_version)
        self.wake()

    async def follow(self) -> None:
        """The ledger changed what serves (a rollback): make the engine follow. Raises EngineError; then `run` tries
        again.
        """
        await self._reconcile()
        self.wake()

    # -- which version serves ------------------------------------------------------------------------------------------

    async def _target(self) -> Version:
        pinned = await self._ledger.pinned()
        return await self._ledger.version(await self._ledger.serving_version() if pinned is None else pinned)

    async def _reconcile(self) -> None:
        """Serve what the ledger says: it knows first, and a crash or a dead engine may have come in between."""
        async with self._swap:
            version = await self._target()
            if version.weight_version != self._serving.current and not is_remote_only(version):
                await self._policy.serve(version)
                log.info("serving", weight_version=version.weight_version)

    async def _publish_next(self) -> bool:
        """Take the newest waiting version through the gate and serve it; the ones before it, which it contains, are
        superseded with it. Never the oldest first: where steps come faster than gates, none would ever serve. False
        when nothing waits.
        """
        async with self._swap:
            if await self._ledger.pinned() is not None:
                return False
            rows = await self._ledger.unfinished_versions()
            waiting = [row.weight_version for row in rows if not is_remote_only(row)]
            serving = await self._ledger.serving_version()
            await self._supersede([number for number in waiting if number < serving])  # a crash came in between
            waiting = [number for number in waiting if number > serving]
            if not waiting or len(self._adapters.loaded) >= self._settings.max_versions:
                # Every slot has running replies: the newest version waits, and a newer one supersedes it meanwhile.
                return False
            *older, newest = sorted(waiting)
            if await self._publication.publish(await self._ledger.version(newest)):
                await self._supersede(older)
        return True

    async def _supersede(self, numbers: Sequence[int]) -> None:
        await publication.supersede(self._ledger, numbers)
        for number in numbers:
            await self._adapters.unload(number)

    async def _serve_tip(self) -> None:
        """When nothing waits and nothing is pinned, the newest version that passed the gate serves. It does not yet
        where it was passed over for a newer one that was then refused, or held back by a pin.
        """
        async with self._swap:
            if await self._ledger.pinned() is not None:
                return
            tip = await self._ledger.version((await self._ledger.tip()).weight_version)
            has_room = (
                tip.weight_version in self._adapters.loaded or len(self._adapters.loaded) < self._settings.max_versions
            )
            passed = tip.state in (VersionState.RETIRED, VersionState.SUPERSEDED)
            if passed and has_room and not is_remote_only(tip):
                await self._serve_again(tip)
                log.info("serving", weight_version=tip.weight_version)

    async def _serve_again(self, version: Version) -> None:
        """Serve a version that passed the gate before. Raises LedgerError when it did not."""
        await self._adapters.load(version)
        await self._ledger.set_version_state(version.weight_version, VersionState.SERVING)
        await self._policy.serve(version)

    # -- which versions stay -------------------------------------------------------------------------------------------

    def _draining(self) -> bool:
        return bool(self._adapters.loaded - {self._serving.current})

    async def _retire_idle(self) -> bool:
        """Unload what no reply and no scoring call uses any more: an unload would wait for them and block every
        load. Whether anything was.
        """
        unloaded = False
        for number in sorted(self._adapters.loaded):
            async with self._swap:  # looked at inside: a pin or a rollback may just have brought it back
                if number == self._serving.current or self._serving.users(number):
                    continue
                await self._adapters.unload(number)
            unloaded = True
            log.info("adapter_unloaded", weight_version=number)
        return unloaded

    async def _prune(self) -> None:
        """Delete the weights of versions that nothing will ask for again."""
        async with self._swap:
            gone = await version_folders.prune(
                self._ledger, self._policy.data_dir, newest=self._settings.keep_versions, in_use=self._adapters.loaded
            )
            self._adapters.forget(gone)
        if gone:
            log.info("versions_pruned", weight_versions=gone)

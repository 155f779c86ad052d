"""The publisher: makes commits of the trainer the version that serves.

It decides which version serves and when the next one is tried. Only this package moves a version's state. After a
restart it finishes what the ledger says was begun. A failure leaves the serving version serving.

Requests never wait for an adapter. New requests take the new name, running ones finish, and an adapter without users is
unloaded. A version that is not durable is on no disk: its trainer sends it (`pushes`).

Leaves to others: one version's way to serving (`publication`), the engine's versions (`engine_weights`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import structlog

from openclaw_rl.engines.admission import VersionUse
from openclaw_rl.errors import AlignmentError, EngineError, LedgerError, RequestError
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing import publication, version_folders
from openclaw_rl.publishing.canary import Canary, ScoreBase
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.publishing.gate import Gate, GateResult
from openclaw_rl.publishing.publication import Publication
from openclaw_rl.publishing.version_folders import is_remote_only
from openclaw_rl.publishing.weight_push import TrainerPushes
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.telemetry.alerts import Alert
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import SHARED_POLICY, Version, VersionState, WeightKind

log = structlog.get_logger()

RETRY_S = 2.0
LONG_WAIT_S = 60.0
"""A version that waits longer for a free slot is a problem in `/healthz`."""
_SLOTS = "publication"
_LEND_S = 2.0
"""Longest wait of a comparison for an engine that is away."""


class Publisher:
    """Owns the choice of the serving version: publishes, pins, rolls back and prunes."""

    def __init__(
        self,
        ledger: Ledger,
        policy: PolicyEngine,
        settings: PublisherSettings,
        *,
        health: Health | None = None,
        canaries: Sequence[Canary] = (),
        score_base: ScoreBase | None = None,
        alert: Alert = log.error,
    ) -> None:
        """health: learns whether versions can be published. score_base: as for the gate."""
        self._ledger, self._policy, self._settings = ledger, policy, settings
        self._serving, self._adapters = policy.serving, policy.adapters
        self._health = health or Health()
        self._on_demand = self._adapters.most is not None
        """Versions that serve come to the engine as requests need them, and there may be many policies."""
        self._wake = asyncio.Event()
        self._step_runs = False
        """A step began since the gate was last prepared."""
        self._waits_since: float | None = None
        """Loop time since which a version waits for a free slot."""
        self._swap = asyncio.Lock()  # one swap at a time: a rollback waits for a publish, and a publish for a rollback
        self._gate = Gate(
            ledger,
            policy.serving,
            policy.score,
            settings,
            canaries=canaries,
            score_base=score_base,
            alert=alert,
            health=self._health,
        )
        self._publication = Publication(
            ledger, policy, self._gate, prewarm_sessions=settings.prewarm_sessions, alert=alert
        )
        self.pushes = TrainerPushes(ledger, policy, self._gate, self._swap, alert=alert)

    @property
    def last_gate(self) -> GateResult | None:
        return self._gate.last

    def last_gate_of(self, policy: str) -> GateResult | None:
        """Return what the gate measured last, if it was of this policy."""
        return self._gate.last if self._gate.policy == policy else None

    def wake(self) -> None:
        """Wake `run`, because a commit, a pin or a rollback happened."""
        self._wake.set()

    def step_begins(self) -> None:
        """Prepare the gate, because a trainer took a batch: its version comes soon."""
        self._step_runs = True
        self.wake()

    async def restore(self) -> None:
        """Serve the ledger's serving version: at start, and after the engine was away.

        Raises EngineError; RemoteOnlyWeights when only the trainer has the weights.
        """
        async with self._swap:
            await self._policy.restore(await self._ledger.target(SHARED_POLICY), self._ledger.version)

    async def is_in_place(self) -> bool:
        """Return True unless the engine says that it lacks the serving version."""
        return await self._policy.is_in_place()

    async def wait_for_engine(self) -> None:
        """Hold chats until the engine is back to `restore` the serving version."""
        self._policy.expect(await self._ledger.target(SHARED_POLICY))

    async def run(self) -> None:
        """Publish waiting versions until cancelled. The app owns this task."""
        while True:
            self._wake.clear()
            try:
                await self._reconcile()
                while await self._publish_next():
                    pass
                await self._serve_tip()
                await self._prune()
                if await self._retire_idle():
                    continue  # a version may have waited for the free slot
                await self._prepare_gate()
            except (EngineError, AlignmentError, LedgerError, TimeoutError) as error:
                log.debug("publish_delayed", error=repr(error), retry_s=RETRY_S)
                if self._serving.is_open:  # otherwise the engine is already reported as down
                    self._health.failed("publisher", repr(error))
                await asyncio.sleep(RETRY_S)
                continue
            self._health.ok("publisher")
            try:
                waits = self._draining() or self._waits_since is not None  # for a reply that ends, and tells nobody
                async with asyncio.timeout(RETRY_S if waits else 3600):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def pin(self, weight_version: int | None, policy: str = SHARED_POLICY) -> None:
        """Serve this version and stop publishing its policy; None: go on publishing `policy`.

        The version that serves is pinned where it is. Another one must have passed the gate and have weights: else the
        call raises LedgerError. Raises EngineError when the engine does not take it. The ledger is then unchanged.
        """
        async with self._swap:
            if weight_version is None:
                await self._ledger.set_pin(None, policy=policy)
            else:
                version = await self._ledger.version(weight_version)
                if weight_version == await self._ledger.serving_version(version.policy):
                    await self._ledger.set_pin(weight_version, policy=version.policy)
                else:
                    await self._ledger.check_can_serve(weight_version)
                    if self._on_demand and not self._has_room(version):  # a load would wait, and keep publications out
                        raise LedgerError("replies run on every version that the engine has room for: try again")
                    pin = partial(self._ledger.set_pin, weight_version, serves=True, policy=version.policy)
                    await self._serve_again(version, pin)
        self.wake()

    async def follow(self) -> None:
        """Serve the version that a rollback chose in the ledger. Raises EngineError; `run` then tries again."""
        await self._reconcile()
        self.wake()

    async def remove(self, policy: str, numbers: Sequence[int]) -> None:
        """Unload a policy that was removed from the ledger. Replies that run on it end first."""
        self._serving.close_policy(policy)  # at once: no new reply begins on it
        self._adapters.forget(numbers)
        if self._on_demand:
            async with self._swap:  # a publication that was under way may have switched it in again
                self._serving.close_policy(policy)
        self.wake()  # `run` unloads what serves no policy and has no user

    @asynccontextmanager
    async def lend(self, weight_version: int) -> AsyncIterator[VersionUse]:
        """Hold a version on the engine for a caller that compares versions; chats keep the serving one.

        Raises LedgerError if the version cannot be loaded beside the serving one, EngineError, RequestError.
        """
        async with AsyncExitStack() as stack:
            async with self._swap:  # else an idle version is unloaded before its use counts
                await self._load_beside(weight_version)
                use = await stack.enter_async_context(self._serving.use(weight_version, within_s=_LEND_S))
            try:
                yield use
            finally:
                await stack.aclose()
                self.wake()  # `run` unloads it, if nobody else uses it

    async def _load_beside(self, weight_version: int) -> None:
        if weight_version == self._serving.current:
            return
        version = await self._ledger.version(weight_version)
        if version.kind is WeightKind.FULL:
            raise LedgerError("full weights replace each other: only the version that serves can answer")
        if weight_version in self._adapters.loaded or weight_version == 0:
            return
        await self._ledger.check_can_serve(weight_version)
        if not self._has_room(version):
            raise LedgerError(
                f"the engine holds {len(self._adapters.loaded)} versions (publisher.max_versions): try again"
            )
        await self._adapters.load(version)

    # -- which version serves ------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        """Serve the ledger's serving versions, if a crash or an engine that was away came in between."""
        async with self._swap:
            version = await self._ledger.target(SHARED_POLICY)
            if version.weight_version != self._serving.current and not is_remote_only(version):
                await self._policy.serve(version)
                log.info("serving", weight_version=version.weight_version)
            elif version.weight_version == self._serving.current:
                await self._policy.note_files(version)
            others = [name for name in self._serving.currents if name != SHARED_POLICY]
            targets = await self._ledger.targets(others) if others else {}
            for policy in set(others) - targets.keys():  # removed while a publication or a load of it ran
                self._serving.close_policy(policy)
            for policy, number in targets.items():
                if number != self._serving.currents.get(policy):
                    self._policy.switch(await self._ledger.version(number))  # the next request brings its adapter
                    log.info("serving", weight_version=number, policy=policy)

    def _has_room(self, *versions: Version) -> bool:
        """Return True if the engine has room for these versions at once."""
        if self._on_demand:
            return self._adapters.can_hold(*versions)
        return len(self._adapters.loaded) < self._settings.max_versions

    async def _publish_next(self) -> bool:
        """Publish the newest waiting version of a policy, and supersede the older ones, which it contains.

        Returns False if no version waits, or none can be loaded now.
        """
        # Newest first: with the oldest first, steps that come faster than gates would keep every version from serving.
        async with self._swap:
            rows = [row for row in await self._ledger.unfinished_versions() if not is_remote_only(row)]
            without_room = []
            for policy in dict.fromkeys(row.policy for row in rows):  # that of the oldest waiting version first
                if await self._ledger.pinned(policy) is not None:
                    continue
                waiting = [row for row in rows if row.policy == policy]
                serving = await self._ledger.target(policy)
                late = [row.weight_version for row in waiting if row.weight_version < serving.weight_version]
                await self._supersede(late)  # a crash came in between
                waiting = [row for row in waiting if row.weight_version > serving.weight_version]
                if not waiting:
                    continue
                *older, newest = waiting
                if not self._has_room(serving, newest):
                    # Every slot has running replies: the newest version waits, and a newer one supersedes it meanwhile.
                    without_room.append(newest.weight_version)
                    continue
                if await self._publish(newest, serving):
                    await self._supersede([row.weight_version for row in older])
                return True
            self._report_wait(without_room)
        return False

    async def _publish(self, newest: Version, serving: Version) -> bool:
        version = await self._ledger.version(newest.weight_version)
        if not self._on_demand:
            return await self._publication.publish(version)
        # Both stay on the engine while they are compared, whatever requests of other policies need meanwhile.
        with self._serving.held(serving.weight_version), self._serving.held(version.weight_version):
            async with asyncio.timeout(self._settings.call_timeout_s):
                await self._adapters.load(serving)
            if version.policy not in self._serving.currents:
                self._policy.switch(serving)
            return await self._publication.publish(version)

    def _report_wait(self, waiting: Sequence[int]) -> None:
        """Report versions that have waited long for a free slot."""
        now = asyncio.get_running_loop().time()
        self._waits_since = (now if self._waits_since is None else self._waits_since) if waiting else None
        if self._waits_since is None:
            self._health.ok(_SLOTS)
        elif now - self._waits_since >= LONG_WAIT_S:
            in_use = ", ".join(map(str, sorted(self._adapters.loaded)))
            error = f"version {max(waiting)} waits for {now - self._waits_since:.0f} s: replies run on {in_use}"
            self._health.failed(_SLOTS, error, at_once=True)

    async def _supersede(self, numbers: Sequence[int]) -> None:
        await publication.supersede(self._ledger, numbers)
        for number in numbers:
            await self._adapters.unload(number)

    async def _serve_tip(self) -> None:
        """Serve the newest version of each policy that passed the gate, unless a version is pinned."""
        # It may have been superseded by a newer one that was then refused, or held back by a pin.
        async with self._swap:
            for tip in await self._ledger.passed_tips():
                has_room = tip.weight_version in self._adapters.loaded or self._has_room(tip)
                if has_room and not is_remote_only(tip):
                    number = tip.weight_version
                    await self._serve_again(tip, partial(self._ledger.set_version_state, number, VersionState.SERVING))
                    log.info("serving", weight_version=tip.weight_version)

    async def _serve_again(self, version: Version, record: Callable[[], Awaitable[None]]) -> None:
        """Serve a version that passed the gate before, then `record` it in the ledger.

        The ledger never names a version that the engine did not take. If `record` fails, `run` serves the version that
        the ledger names.
        """
        await self._policy.serve(version)
        try:
            await record()
        except LedgerError:
            self.wake()
            raise

    async def _prepare_gate(self) -> None:
        """Score stored replies under the versions that the engine has, while the step runs. Raises LedgerError."""
        if not self._step_runs:
            return
        self._step_runs = False
        if self._on_demand:  # which policy's version comes is not known here
            return
        if await self._ledger.pinned() is not None or (await self._ledger.tip()).kind is not WeightKind.LORA:
            return
        async with AsyncExitStack() as stack:
            try:
                # Its use keeps the adapter loaded. The lock is free while the engine scores: a rollback needs it.
                async with self._swap:
                    if not self._serving.is_open:
                        return
                    serving = self._serving.current
                    await stack.enter_async_context(self._serving.use(serving, within_s=_LEND_S))
                await self._gate.prepare(serving)
            except (EngineError, AlignmentError, RequestError, TimeoutError) as error:  # the gate asks again
                log.debug("gate_not_prepared", error=repr(error))

    # -- which versions stay -------------------------------------------------------------------------------------------

    def _draining(self) -> bool:
        return bool(self._adapters.loaded - set(self._serving.currents.values()))

    async def _retire_idle(self) -> bool:
        """Unload versions that no reply and no scoring call uses. Return True if one was unloaded."""
        # Only unused ones: an unload waits for the adapter's users, and blocks every load meanwhile.
        unloaded = False
        for number in sorted(self._adapters.loaded):
            async with self._swap:  # checked inside: a pin or a rollback may just have brought it back
                if number in self._serving.currents.values() or not await self._adapters.unload_idle(number):
                    continue
            unloaded = True
            log.info("adapter_unloaded", weight_version=number)
        return unloaded

    async def _prune(self) -> None:
        """Delete the weights of versions that can no longer serve or be rolled back to."""
        async with self._swap:
            gone = await version_folders.prune(
                self._ledger, self._policy.data_dir, newest=self._settings.keep_versions, in_use=self._adapters.loaded
            )
            self._adapters.forget(gone)
        if gone:
            log.info("versions_pruned", weight_versions=gone)

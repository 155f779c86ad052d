"""The publisher: commits become served versions. *files → load → gate → self-test → prewarm → switch → drain → unload.*

It alone moves a version's state, and finishes at a restart what the ledger says was begun. A failure leaves the
version that serves serving. Requests never wait for an adapter: it is loaded beside the old one, new requests take the
new name, running ones finish. Full weights replace the engine's own (`full_weights`), and are tested once they serve:
what fails then is swapped back. A version that is not durable is on no disk: its trainer sends it (`take_pushed`).
"""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import structlog

from openclaw_rl.alerts import Alert
from openclaw_rl.engines.base import Engine
from openclaw_rl.engines.serving import Closed, ServingVersions, adapter_name, is_unknown_adapter
from openclaw_rl.errors import AlignmentError, CommitRefused, EngineError, EngineRefused, LedgerError
from openclaw_rl.ledger import Ledger
from openclaw_rl.meters import Meters
from openclaw_rl.publishing import version_folders
from openclaw_rl.publishing.canary import Canary
from openclaw_rl.publishing.engine_adapters import EngineAdapters
from openclaw_rl.publishing.finite_weights import not_finite
from openclaw_rl.publishing.full_weights import FullWeightSwap, is_held
from openclaw_rl.publishing.gate import Gate, GateResult
from openclaw_rl.publishing.version_folders import is_elsewhere
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.trainers.api import Report, Tip
from openclaw_rl.types import Ids, Version, VersionState, WeightKind

log = structlog.get_logger()

RETRY_S = 2.0
REJECTIONS_IN_A_ROW = 3


class WeightsElsewhere(EngineError):
    """The version that should serve is on no disk: its trainer has to send it again."""


class Publisher:
    def __init__(
        self,
        ledger: Ledger,
        engine: Engine,
        serving: ServingVersions,
        settings: PublisherSettings,
        data_dir: Path,
        *,
        base_folder: Path | None = None,
        meters: Meters | None = None,
        canaries: Sequence[Canary] = (),
        alert: Alert = log.error,
    ) -> None:
        """base_folder: the base's weights, for a run of full weights that goes back to version 0. meters: learn whether
        versions can be published."""
        self._ledger, self._engine, self._serving, self._settings, self._data_dir = (
            ledger,
            engine,
            serving,
            settings,
            data_dir,
        )
        self._alert = alert
        self._gate = Gate(ledger, serving, self._score, settings, canaries=canaries, alert=alert)
        self._full = FullWeightSwap(
            engine,
            serving,
            drain_s=settings.unbroken_drain_s,
            call_timeout_s=settings.call_timeout_s,
            push_timeout_s=settings.push_timeout_s,
        )
        self._base_folder = base_folder
        self._meters = meters or Meters()
        self._adapters = EngineAdapters(engine, serving, data_dir, call_timeout_s=settings.call_timeout_s)
        self._kind = WeightKind.LORA
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()  # one swap at a time: a rollback waits for a publish and the other way round
        self._name, self._restarts = secrets.token_hex(4), 0
        """Of the engine as we know it: another one once it came back without what it should hold."""
        self._missed: int | None = None
        """The version that should serve, while only its trainer has it."""
        self.last_gate: GateResult | None = None

    def wake(self) -> None:
        """A commit, a pin or a rollback happened."""
        self._wake.set()

    async def restore(self) -> None:
        """Serve what the ledger says serves: at start, and after the engine was away and may have come back empty.
        Versions that replies still use are loaded again as well, the others are let go.
        """
        async with self._turn:
            version = await self._target()
            self._kind = version.kind
            if version.kind is WeightKind.FULL:
                await self._restore_full(version)
                return
            self._adapters.loaded.discard(version.weight_version)
            await self._adapters.load(version)
            self._switch(version.weight_version)
            for number in sorted(self._adapters.loaded - {version.weight_version}):
                if self._serving.users(number):
                    self._adapters.loaded.discard(number)
                    await self._adapters.load(await self._ledger.version(number))
                else:
                    await self._adapters.unload(number)
        log.info("serving", weight_version=version.weight_version)

    async def is_in_place(self) -> bool:
        """Whether the engine still holds the version that serves. An engine that does not say, or is silent, is
        believed: its health is another's question.
        """
        current, name = self._serving.current, self._serving.lora_path(self._serving.current)
        try:
            async with asyncio.timeout(self._settings.call_timeout_s):
                if name is not None:
                    folders = await self._engine.adapter_folders()
                    holds = folders is None or name in folders
                else:
                    holds = self._kind is WeightKind.LORA or is_held(current, await self._engine.model_info())
        except (EngineError, TimeoutError):
            return True
        return holds or current != self._serving.current or not self._serving.is_open  # a swap came in between

    async def wait_for_engine(self) -> None:
        """The engine is not there to `restore`: chats wait for the version that is to serve."""
        version = await self._target()
        self._serving.close_gate()
        if version.kind is WeightKind.FULL:
            self._serving.switch(version.weight_version, None)
        else:
            self._switch(version.weight_version)

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
                    self._meters.failed("publisher", repr(error))
                await asyncio.sleep(RETRY_S)
                continue
            self._meters.worked("publisher")
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
            async with self._turn:
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

    async def describe(self, tip: Tip) -> Tip:
        """Whether its trainer should send it to the engine, and which engine that is."""
        version = await self._ledger.version(tip.weight_version)
        is_missing = self._missed == version.weight_version or version.state is not VersionState.SERVING
        wants = is_elsewhere(version) and is_missing
        wants = wants and await self._ledger.pinned() in (None, version.weight_version)
        return tip.model_copy(update={"wants_push": wants, "engine": f"{self._name}-{self._restarts}"})

    async def take_pushed(self, weight_version: int, transfer: Callable[[], Awaitable[None]]) -> None:
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
            await self._is_still_the_same_engine()
            report = Report.model_validate(json.loads(version.report_json))
            await self._pass_gate(version, report)
            await self._gate.needs_numbers(report.probes)
            times = await self._full.receive(weight_version, transfer)
            self._missed = None
            log.info("weights_received", weight_version=weight_version, **asdict(times))
            refusal = await self._gate.self_test(weight_version, report.probes)
            if refusal is not None:
                self._full.is_unsure = True  # of the old weights nothing is left: the keeper restores what should serve
                self._serving.close_gate(Closed.ENGINE)
                if version.state is not VersionState.SERVING:
                    await self._reject(weight_version, refusal)
                raise CommitRefused(refusal)
            await self._ledger.set_version_state(weight_version, VersionState.SERVING)
            older = [version.weight_version for version in await self._ledger.unfinished_versions()]
            await self._supersede([number for number in older if number < weight_version])
            log.info("published", weight_version=weight_version, parent=version.parent)

    async def _is_still_the_same_engine(self) -> None:
        """Raises CommitRefused for one that was started again before the keeper looked: its trainer would send on a way
        that died with the old one, and wait for the deadline of that.
        """
        current = self._serving.current
        if self._missed is not None or self._full.is_unsure or is_held(current, await self._engine.model_info()):
            return
        self._serving.close_gate(Closed.ENGINE)
        self._restarts, self._missed = self._restarts + 1, current
        raise CommitRefused("the engine was started again: meet it anew")

    async def _pass_gate(self, version: Version, report: Report) -> None:
        """To LOADING, for one that never served. Raises CommitRefused when the gate refuses it."""
        number = version.weight_version
        if version.state is VersionState.CANDIDATE:
            self.last_gate = await self._gate.check(version, report)
            if (refusal := self.last_gate.refusal) is not None:
                await self._reject(number, refusal)
                raise CommitRefused(refusal)
            await self._ledger.set_version_state(number, VersionState.GATED)
        if version.state in (VersionState.CANDIDATE, VersionState.GATED):
            await self._ledger.set_version_state(number, VersionState.LOADING)

    # -- one publication -----------------------------------------------------------------------------------------------

    async def _target(self) -> Version:
        pinned = await self._ledger.pinned()
        return await self._ledger.version(await self._ledger.serving_version() if pinned is None else pinned)

    async def _reconcile(self) -> None:
        """Serve what the ledger says: it knows first, and a crash or a dead engine may have come in between."""
        async with self._turn:
            version = await self._target()
            if version.weight_version != self._serving.current and not is_elsewhere(version):
                await self._serve(version)
                log.info("serving", weight_version=version.weight_version)

    async def _publish_next(self) -> bool:
        """Take the newest waiting version through the gate and serve it; the ones before it, which it contains, are
        superseded with it. Never the oldest first: where steps come faster than gates, none would ever serve. False
        when nothing waits.
        """
        async with self._turn:
            if await self._ledger.pinned() is not None:
                return False
            rows = await self._ledger.unfinished_versions()
            waiting = [row.weight_version for row in rows if not is_elsewhere(row)]
            serving = await self._ledger.serving_version()
            await self._supersede([number for number in waiting if number < serving])  # a crash came in between
            waiting = [number for number in waiting if number > serving]
            if not waiting or len(self._adapters.loaded) >= self._settings.max_versions:
                # Every slot has running replies: the newest version waits, and a newer one supersedes it meanwhile.
                return False
            *older, newest = sorted(waiting)
            if await self._publish(await self._ledger.version(newest)):
                await self._supersede(older)
        return True

    async def _supersede(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (await self._ledger.version(number)).state is VersionState.CANDIDATE:
                await self._ledger.set_version_state(number, VersionState.GATED)
            await self._ledger.set_version_state(number, VersionState.SUPERSEDED, "a newer version was ready first")
            await self._adapters.unload(number)

    async def _serve_tip(self) -> None:
        """When nothing waits and nothing is pinned, the newest version that passed the gate serves. It does not yet
        where it was passed over for a newer one that was then refused, or held back by a pin.
        """
        async with self._turn:
            if await self._ledger.pinned() is not None:
                return
            tip = await self._ledger.version((await self._ledger.tip()).weight_version)
            has_room = (
                tip.weight_version in self._adapters.loaded or len(self._adapters.loaded) < self._settings.max_versions
            )
            passed = tip.state in (VersionState.RETIRED, VersionState.SUPERSEDED)
            if passed and has_room and not is_elsewhere(tip):
                await self._serve_again(tip)
                log.info("serving", weight_version=tip.weight_version)

    async def _serve_again(self, version: Version) -> None:
        """Serve a version that passed the gate before. Raises LedgerError when it did not."""
        await self._adapters.load(version)
        await self._ledger.set_version_state(version.weight_version, VersionState.SERVING)
        await self._serve(version)

    async def _publish(self, version: Version) -> bool:
        """Whether it serves now."""
        number = version.weight_version
        bound = log.bind(weight_version=number, parent=version.parent)
        times = _PhaseTimes()
        if version.state is VersionState.CANDIDATE and version.folder is not None:
            # Before the engine has it: full weights are tested while they serve.
            refusal = await asyncio.to_thread(not_finite, self._data_dir / version.folder)
            times.ends("files_s")
            if refusal is not None:
                await self._reject(number, refusal)
                return False
        try:
            await self._adapters.load(version)
        except EngineRefused as error:
            await self._reject(number, f"the engine refused it: {error}")
            return False
        times.ends("load_s")
        if version.state is VersionState.CANDIDATE:
            report = Report.model_validate(json.loads(version.report_json))
            result = await self._gate.check(version, report)
            times.ends("gate_s")
            refusal = result.refusal
            if refusal is None and version.kind is WeightKind.LORA:
                refusal = await self._gate.self_test(number, report.probes)
            times.ends("self_test_s")
            self.last_gate = result
            bound.info(
                "gate", step_kl=result.step_kl, base_kl=result.base_kl, canary_drop=result.canary_drop, refusal=refusal
            )
            if refusal:
                await self._adapters.unload(number)
                await self._reject(number, refusal)
                return False
            await self._ledger.set_version_state(number, VersionState.GATED)
        if version.state is not VersionState.LOADING:
            await self._ledger.set_version_state(number, VersionState.LOADING)
        if version.kind is WeightKind.FULL and (refusal := await self._try_full(version)) is not None:
            await self._reject(number, refusal)
            return False
        if version.kind is WeightKind.LORA:
            await self._prewarm(number)
            self._switch(number)
        times.ends("switch_s")
        await self._ledger.set_version_state(number, VersionState.SERVING)
        bound.info("published", **times.seconds)
        return True

    async def _reject(self, number: int, reason: str) -> None:
        rejected = await self._ledger.reject(number, reason)
        in_a_row = await self._ledger.rejections_in_a_row()
        log.warning("version_rejected", weight_version=number, reason=reason, with_it=rejected, in_a_row=in_a_row)
        if in_a_row >= REJECTIONS_IN_A_ROW:
            await self._ledger.set_learning(False)
            reason = f"{in_a_row} versions rejected in a row"
            self._alert("learning_paused", reason=reason, resume="openclaw-rl learning resume")

    # -- scoring -------------------------------------------------------------------------------------------------------

    async def _score(self, number: int, prompt_ids: Ids, response_ids: Ids) -> tuple[float, ...]:
        lora_path = self._serving.lora_path(number)
        try:
            async with asyncio.timeout(self._settings.call_timeout_s):
                score = await self._engine.score(prompt_ids, response_ids, lora_path=lora_path, extra_key=f"v{number}")
        except EngineRefused as error:
            if is_unknown_adapter(error, lora_path):  # it came back empty, faster than anyone looked
                self._serving.close_gate()
            raise
        return score.log_probs

    # -- the engine's own weights --------------------------------------------------------------------------------------

    async def _serve(self, version: Version) -> None:
        """Make new requests take this version."""
        if version.kind is WeightKind.FULL:
            weights = version_folders.weights_of(version, self._data_dir, self._base_folder)
            times = await self._full.swap(version.weight_version, weights)
            log.info("weights_swapped", weight_version=version.weight_version, **asdict(times))
        else:
            await self._adapters.load(version)
            self._switch(version.weight_version)

    async def _try_full(self, version: Version) -> str | None:
        """Serve it, and go back when the engine's numbers are not the trainer's. A reason when they are not; it is none
        when the engine has no numbers for the old weights either."""
        before = await self._ledger.version(self._serving.current)
        report = Report.model_validate(json.loads(version.report_json))
        await self._gate.needs_numbers(report.probes)
        await self._serve(version)
        refusal = await self._gate.self_test(version.weight_version, report.probes)
        if refusal is not None:
            await self._serve(before)
            await self._gate.needs_numbers(report.probes)
        return refusal

    async def _restore_full(self, version: Version) -> None:
        """An engine that started again holds the base; one that was only away may still hold what it should."""
        number, info = version.weight_version, await self._engine.model_info()
        if not self._full.is_unsure and is_held(number, info):
            self._serving.switch(number, None)
        elif is_elsewhere(version):
            self._serving.switch(number, None)
            self._serving.close_gate(Closed.ENGINE)
            self._restarts += self._missed != number
            self._missed = number
            raise WeightsElsewhere(f"version {number} should serve, and only its trainer has it")
        else:
            self._restarts += self._missed is None
            await self._serve(version)
        self._missed = None
        log.info("serving", weight_version=number)

    # -- adapters -----------------------------------------------------------------------------------------------------

    def _switch(self, number: int) -> None:
        self._serving.switch(number, adapter_name(number))

    def _draining(self) -> bool:
        return bool(self._adapters.loaded - {self._serving.current})

    async def _retire_idle(self) -> bool:
        """Unload what no reply and no scoring call uses any more: an unload would wait for them and block every
        load. Whether anything was.
        """
        unloaded = False
        for number in sorted(self._adapters.loaded):
            async with self._turn:  # looked at inside: a pin or a rollback may just have brought it back
                if number == self._serving.current or self._serving.users(number):
                    continue
                await self._adapters.unload(number)
            unloaded = True
            log.info("adapter_unloaded", weight_version=number)
        return unloaded

    async def _prune(self) -> None:
        """Delete the weights of versions that nothing will ask for again."""
        async with self._turn:
            gone = await version_folders.prune(
                self._ledger, self._data_dir, newest=self._settings.keep_versions, in_use=self._adapters.loaded
            )
            self._adapters.forget(gone)
        if gone:
            log.info("versions_pruned", weight_versions=gone)

    async def _prewarm(self, number: int) -> None:
        """Prefill the prompts of recently active sessions on the new version, so that their next turn finds its
        prefix cached.
        """
        for prompt_ids in await self._ledger.recent_prompts(limit=self._settings.prewarm_sessions):
            if len(prompt_ids) > 1:
                await self._score(number, prompt_ids[:-1], prompt_ids[-1:])


class _PhaseTimes:
    """What a publication spent its time on, for the log."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def ends(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self._since = round(now - self._since, 3), now

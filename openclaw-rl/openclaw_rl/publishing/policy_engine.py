"""The policy's versions on its engine, of either kind: adapters beside each other, or the engine's own weights.

Promises: once `serve` has returned, new requests get that version. An engine that came back without what it should hold
goes by another name from then on, so that a trainer that sends weights to it meets it anew.

Leaves to others: which version, and that one call at a time changes what serves (`publisher`, `pushed_weights`).
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import structlog

from openclaw_rl.engines.base import Engine
from openclaw_rl.engines.serving import Closed, ServingVersions, adapter_name, is_unknown_adapter
from openclaw_rl.errors import CommitRefused, EngineError, EngineRefused
from openclaw_rl.publishing import version_folders
from openclaw_rl.publishing.engine_adapters import EngineAdapters
from openclaw_rl.publishing.full_weights import FullWeightSwap, is_held
from openclaw_rl.publishing.version_folders import is_elsewhere
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.types import Ids, LogProbs, Version, WeightKind

log = structlog.get_logger()


class WeightsElsewhere(EngineError):
    """The version that should serve is on no disk: its trainer has to send it again."""


class PolicyEngine:
    def __init__(
        self,
        engine: Engine,
        serving: ServingVersions,
        settings: PublisherSettings,
        data_dir: Path,
        *,
        base_folder: Path | None = None,
    ) -> None:
        """base_folder: the base's weights, for a run of full weights that goes back to version 0."""
        self._engine, self._serving, self._call_timeout_s = engine, serving, settings.call_timeout_s
        self._data_dir, self._base_folder = data_dir, base_folder
        self.adapters = EngineAdapters(engine, serving, data_dir, call_timeout_s=settings.call_timeout_s)
        self._full = FullWeightSwap(
            engine,
            serving,
            drain_s=settings.unbroken_drain_s,
            call_timeout_s=settings.call_timeout_s,
            push_timeout_s=settings.push_timeout_s,
        )
        self._kind = WeightKind.LORA
        self._name, self._restarts = secrets.token_hex(4), 0
        self.missed: int | None = None
        """The version that should serve, while only its trainer has it."""

    @property
    def name(self) -> str:
        """Another one once it came back without what it should hold."""
        return f"{self._name}-{self._restarts}"

    async def serve(self, version: Version) -> None:
        """Make new requests take this version. Raises EngineError; then what served serves, or the gate is shut."""
        if version.kind is WeightKind.FULL:
            weights = version_folders.weights_of(version, self._data_dir, self._base_folder)
            times = await self._full.swap(version.weight_version, weights)
            log.info("weights_swapped", weight_version=version.weight_version, **asdict(times))
        else:
            await self.adapters.load(version)
            self._switch(version.weight_version)

    async def receive(self, weight_version: int, transfer: Callable[[], Awaitable[None]]) -> None:
        """Serve the weights that a trainer sends while `transfer` runs. Raises EngineError; what broke off on the way
        leaves the gate shut."""
        times = await self._full.receive(weight_version, transfer)
        self.missed = None
        log.info("weights_received", weight_version=weight_version, **asdict(times))

    def distrust(self) -> None:
        """What the engine holds must not serve, and of the weights before nothing is left: the gate stays shut until
        the keeper has restored what should serve."""
        self._full.is_unsure = True
        self._serving.close_gate(Closed.ENGINE)

    async def score(self, number: int, prompt_ids: Ids, response_ids: Ids) -> LogProbs:
        """Forced log-probs of a reply under a version that is loaded."""
        lora_path = self._serving.lora_path(number)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                score = await self._engine.score(prompt_ids, response_ids, lora_path=lora_path, extra_key=f"v{number}")
        except EngineRefused as error:
            if is_unknown_adapter(error, lora_path):  # it came back empty, faster than anyone looked
                self._serving.close_gate()
            raise
        return score.log_probs

    def _switch(self, number: int) -> None:
        self._serving.switch(number, adapter_name(number))

    # -- an engine that was away ---------------------------------------------------------------------------------------

    async def is_in_place(self) -> bool:
        """Whether the engine still holds the version that serves. An engine that does not say, or is silent, is
        believed: its health is another's question.
        """
        current, name = self._serving.current, self._serving.lora_path(self._serving.current)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                if name is not None:
                    folders = await self._engine.adapter_folders()
                    holds = folders is None or name in folders
                else:
                    holds = self._kind is WeightKind.LORA or is_held(current, await self._engine.model_info())
        except (EngineError, TimeoutError):
            return True
        return holds or current != self._serving.current or not self._serving.is_open  # a swap came in between

    async def check_is_the_same(self) -> None:
        """Raises CommitRefused for one that was started again before the keeper looked: its trainer would send on a way
        that died with the old one, and wait for the deadline of that.
        """
        current = self._serving.current
        if self.missed is not None or self._full.is_unsure or is_held(current, await self._engine.model_info()):
            return
        self._serving.close_gate(Closed.ENGINE)
        self._restarts, self.missed = self._restarts + 1, current
        raise CommitRefused("the engine was started again: meet it anew")

    def expect(self, version: Version) -> None:
        """The engine is not there to `restore`: chats wait for this version."""
        self._serving.close_gate()
        if version.kind is WeightKind.FULL:
            self._serving.switch(version.weight_version, None)
        else:
            self._switch(version.weight_version)

    async def restore(self, version: Version, find: Callable[[int], Awaitable[Version]]) -> None:
        """Serve this version on an engine that may have come back empty. Versions that replies still use are loaded
        again as well, the others are let go.
        """
        self._kind = version.kind
        if version.kind is WeightKind.FULL:
            await self._restore_full(version)
        else:
            self.adapters.loaded.discard(version.weight_version)
            await self.adapters.load(version)
            self._switch(version.weight_version)
            for number in sorted(self.adapters.loaded - {version.weight_version}):
                if self._serving.users(number):
                    self.adapters.loaded.discard(number)
                    await self.adapters.load(await find(number))
                else:
                    await self.adapters.unload(number)
        log.info("serving", weight_version=version.weight_version)

    async def _restore_full(self, version: Version) -> None:
        """An engine that started again holds the base; one that was only away may still hold what it should."""
        number, info = version.weight_version, await self._engine.model_info()
        if not self._full.is_unsure and is_held(number, info):
            self._serving.switch(number, None)
        elif is_elsewhere(version):
            self._serving.switch(number, None)
            self._serving.close_gate(Closed.ENGINE)
            self._restarts += self.missed != number
            self.missed = number
            raise WeightsElsewhere(f"version {number} should serve, and only its trainer has it")
        else:
            self._restarts += self.missed is None
            await self.serve(version)
        self.missed = None

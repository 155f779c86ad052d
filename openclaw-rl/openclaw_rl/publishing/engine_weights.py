"""The policy's versions on its engine: adapters beside each other, or the engine's own full weights.

Promises:

- Once `serve` has returned, new requests get that version.
- A version is in `loaded` only after its EMA teacher is loaded too.
- An adapter of our name that another run left on the engine is replaced.
- An engine that came back without its version gets another name, so that a trainer that sends weights to it starts a
  new connection.

Leaves to others: the choice of the version, and one swap at a time (`publisher`, `weight_push`); counting the replies
that use a version (`engines.admission`).
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import structlog

from openclaw_rl.engines.admission import Closed, VersionAdmission, is_unknown_adapter
from openclaw_rl.engines.base import Engine
from openclaw_rl.engines.version_keys import adapter_name, cache_salt, ema_name
from openclaw_rl.errors import CommitRefused, EngineError, EngineRefused
from openclaw_rl.publishing import version_folders
from openclaw_rl.publishing.full_swap import FullWeightSwap, is_held
from openclaw_rl.publishing.version_folders import is_remote_only
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.trainers import checkpoint
from openclaw_rl.types import KEYLESS_USER, Ids, LogProbs, Version, WeightKind

log = structlog.get_logger()


class EngineAdapters:
    """The adapters that the engine holds for us, loaded and unloaded one at a time."""

    def __init__(
        self,
        engine: Engine,
        serving: VersionAdmission,
        data_dir: Path,
        *,
        call_timeout_s: float,
        health: Health | None = None,
    ) -> None:
        self._engine, self._serving, self._data_dir, self._call_timeout_s = engine, serving, data_dir, call_timeout_s
        self._health = health or Health()
        self.loaded: set[int] = set()
        """Versions whose adapter the engine holds."""
        self._ours: dict[str, Path] = {}
        """Adapters that the engine took from us, with their folders."""

    async def load(self, version: Version) -> None:
        """Load the version's adapter and its EMA teacher. Full weights and the base have none. Raises EngineError."""
        number, name = version.weight_version, adapter_name(version.weight_version)
        if name is None or number in self.loaded or version.kind is WeightKind.FULL:
            return
        if version.folder is None:
            raise EngineRefused(f"version {number} has no folder", status=400)
        started, folder = time.perf_counter(), self._data_dir / version.folder
        if await asyncio.to_thread((folder / checkpoint.EMA_FOLDER).is_dir):
            await self._load_as(ema_name(number), folder / checkpoint.EMA_FOLDER)
            self._serving.add_ema(number)
        await self._load_as(name, folder)  # last: a version in `loaded` has its teacher
        self.loaded.add(number)
        self._health.push.observe(time.perf_counter() - started)

    async def _load_as(self, name: str, folder: Path) -> None:
        async with asyncio.timeout(self._call_timeout_s):
            try:
                await self._engine.load_adapter(name, folder)
            except EngineRefused as error:
                if "already loaded" not in str(error):
                    raise
                if not await self._has_loaded(name, folder):
                    log.warning("adapter_of_another_run", adapter=name)
                    await self._engine.unload_adapter(name)
                    await self._engine.load_adapter(name, folder)
        self._ours[name] = folder

    async def _has_loaded(self, name: str, folder: Path) -> bool:
        """Return True if the adapter that the engine has under this name is ours."""
        # An attached engine outlives us, and may have served another data directory. A folder is never rewritten.
        folders = await self._engine.adapter_folders()
        if folders is None:  # this engine does not list folders: what it took from us is ours
            return self._ours.get(name) == folder
        return folders.get(name) == str(folder)

    async def unload(self, number: int) -> None:
        """Unload the version's adapter and its EMA teacher, if they are loaded."""
        name = adapter_name(number)
        if name is None or number not in self.loaded:
            return
        for loaded in (ema_name(number), name) if self._serving.has_ema(number) else (name,):
            try:
                async with asyncio.timeout(self._call_timeout_s):
                    await self._engine.unload_adapter(loaded)
            except EngineRefused as error:  # an engine that was restarted does not know it
                log.info("adapter_already_gone", weight_version=number, adapter=loaded, error=str(error))
        self._serving.drop_ema(number)
        self.loaded.discard(number)

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget the folders of versions whose weights were deleted."""
        for number in numbers:
            self._ours.pop(adapter_name(number) or "", None)
            self._ours.pop(ema_name(number), None)


class RemoteOnlyWeights(EngineError):
    """The version that should serve is on no disk: its trainer has to send it again."""


class PolicyEngine:
    """The engine of the policy, and the one version that new requests get."""

    def __init__(
        self,
        engine: Engine,
        serving: VersionAdmission,
        settings: PublisherSettings,
        data_dir: Path,
        *,
        base_folder: Path | None = None,
        health: Health | None = None,
    ) -> None:
        """base_folder: the base's weights, for a rollback to version 0 of full weights."""
        self._engine, self.serving, self._call_timeout_s = engine, serving, settings.call_timeout_s
        self.data_dir, self._base_folder = data_dir, base_folder
        self._health = health or Health()
        self.adapters = EngineAdapters(
            engine, serving, data_dir, call_timeout_s=settings.call_timeout_s, health=self._health
        )
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
        """The version that should serve, while only its trainer has its weights."""

    @property
    def name(self) -> str:
        """The engine's name. It changes when the engine came back without its version."""
        return f"{self._name}-{self._restarts}"

    async def serve(self, version: Version) -> None:
        """Make new requests take this version.

        Raises EngineError. The old version then serves, or chats are held until `EngineReadiness` restores one.
        """
        if version.kind is WeightKind.FULL:
            weights = version_folders.weights_of(version, self.data_dir, self._base_folder)
            times = await self._full.swap(version.weight_version, weights)
            self._health.push.observe(times.push_s)
            log.info("weights_swapped", weight_version=version.weight_version, **asdict(times))
        else:
            await self.adapters.load(version)
            self._switch(version.weight_version)

    async def receive(self, weight_version: int, transfer: Callable[[], Awaitable[None]]) -> None:
        """Serve the weights that a trainer sends while `transfer` runs.

        Raises EngineError. A transfer that failed leaves chats held.
        """
        times = await self._full.receive(weight_version, transfer)
        self._health.push.observe(times.push_s)
        self.missed = None
        log.info("weights_received", weight_version=weight_version, **asdict(times))

    def mark_untrusted(self) -> None:
        """Hold chats until `EngineReadiness` has restored the version that should serve.

        The engine's weights failed their test, and the weights before them are gone.
        """
        self._full.is_unsure = True
        self.serving.hold(Closed.ENGINE)

    async def score(self, number: int, prompt_ids: Ids, response_ids: Ids, *, user: str = KEYLESS_USER) -> LogProbs:
        """Return the forced log-probs of a reply under a loaded version. user: the one whose prefix cache it fills."""
        lora_path = self.serving.lora_path(number)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                score = await self._engine.score(
                    prompt_ids, response_ids, lora_path=lora_path, extra_key=cache_salt(number, user)
                )
        except EngineRefused as error:
            if is_unknown_adapter(error, lora_path):  # the engine came back empty before `EngineReadiness` saw it away
                self.serving.hold()
            raise
        return score.log_probs

    def _switch(self, number: int) -> None:
        self.serving.switch(number, adapter_name(number))

    # -- an engine that was away ---------------------------------------------------------------------------------------

    async def is_in_place(self) -> bool:
        """Return True unless the engine says that it lacks the serving version."""
        # An engine that does not answer counts as in place: `EngineReadiness` checks its health elsewhere.
        current, name = self.serving.current, self.serving.lora_path(self.serving.current)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                if name is not None:
                    folders = await self._engine.adapter_folders()
                    holds = folders is None or name in folders
                else:
                    holds = self._kind is WeightKind.LORA or is_held(current, await self._engine.model_info())
        except (EngineError, TimeoutError):
            return True
        return holds or current != self.serving.current or not self.serving.is_open  # a swap came in between

    async def check_is_the_same(self) -> None:
        """Raise CommitRefused if the engine started again and `EngineReadiness` did not see it yet."""
        # The trainer would send into a group that died with the old engine, and wait for its deadline.
        current = self.serving.current
        if self.missed is not None or self._full.is_unsure or is_held(current, await self._engine.model_info()):
            return
        self.serving.hold(Closed.ENGINE)
        self._restarts, self.missed = self._restarts + 1, current
        raise CommitRefused("the engine was started again: meet it anew")

    def expect(self, version: Version) -> None:
        """Hold chats until the engine is back to `restore` this version."""
        self.serving.hold()
        if version.kind is WeightKind.FULL:
            self.serving.switch(version.weight_version, None)
        else:
            self._switch(version.weight_version)

    async def restore(self, version: Version, find: Callable[[int], Awaitable[Version]]) -> None:
        """Serve this version on an engine that may have come back empty.

        Versions that replies still use are loaded again too; the others are unloaded.
        """
        self._kind = version.kind
        if version.kind is WeightKind.FULL:
            await self._restore_full(version)
        else:
            self.adapters.loaded.discard(version.weight_version)
            await self.adapters.load(version)
            self._switch(version.weight_version)
            for number in sorted(self.adapters.loaded - {version.weight_version}):
                if self.serving.users(number):
                    self.adapters.loaded.discard(number)
                    await self.adapters.load(await find(number))
                else:
                    await self.adapters.unload(number)
        log.info("serving", weight_version=version.weight_version)

    async def _restore_full(self, version: Version) -> None:
        """Serve full weights: keep them if the engine still holds them, else push them from disk.

        Raises RemoteOnlyWeights when they are on no disk.
        """
        number, info = version.weight_version, await self._engine.model_info()
        if not self._full.is_unsure and is_held(number, info):
            self.serving.switch(number, None)
        elif is_remote_only(version):
            self.serving.switch(number, None)
            self.serving.hold(Closed.ENGINE)
            self._restarts += self.missed != number
            self.missed = number
            raise RemoteOnlyWeights(f"version {number} should serve, and only its trainer has it")
        else:
            self._restarts += self.missed is None
            await self.serve(version)
        self.missed = None

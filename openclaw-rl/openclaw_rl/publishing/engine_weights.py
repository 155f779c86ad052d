"""The policy's versions on its engine: adapters beside each other, or the engine's own full weights.

Promises:

- Once `serve` has returned, new requests get that version.
- An engine that came back without its version gets another name, so that a trainer that sends weights to it starts a
  new connection.

Leaves to others: the adapters themselves (`engine_adapters`); the choice of the version, and one swap at a time
(`publisher`, `weight_push`); counting the replies that use a version (`engines.admission`).
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import structlog

from openclaw_rl.data_dir import PUSH
from openclaw_rl.engines.admission import Closed, VersionAdmission, is_unknown_adapter
from openclaw_rl.engines.base import Engine
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.engines.pool_member import Weights
from openclaw_rl.engines.version_keys import cache_salt
from openclaw_rl.errors import CommitRefused, EngineError, EngineRefused
from openclaw_rl.publishing import engine_adapters, version_folders
from openclaw_rl.publishing.engine_adapters import EngineAdapters
from openclaw_rl.publishing.full_swap import FullWeightSwap, in_time, is_held
from openclaw_rl.publishing.pushed_files import PushedFiles
from openclaw_rl.publishing.rolling_swap import RollingSwap
from openclaw_rl.publishing.trainer_group import TrainerGroup
from openclaw_rl.publishing.version_folders import is_remote_only
from openclaw_rl.settings import PublisherSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import KEYLESS_USER, Ids, LogProbs, Version, WeightKind

log = structlog.get_logger()

_FILES = "pushed weights"


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
        most_adapters: int | None = None,
    ) -> None:
        """base_folder: the base's weights, for a rollback to version 0 of full weights. most_adapters: as for
        `EngineAdapters`."""
        self._engine, self.serving, self._call_timeout_s = engine, serving, settings.call_timeout_s
        self.data_dir, self._base_folder = data_dir, base_folder
        self._health = health or Health()
        self.adapters = EngineAdapters(
            engine,
            serving,
            data_dir,
            call_timeout_s=settings.call_timeout_s,
            most=most_adapters,
            health=self._health,
        )
        self._full = FullWeightSwap(
            engine,
            serving,
            drain_s=settings.unbroken_drain_s,
            call_timeout_s=settings.call_timeout_s,
            push_timeout_s=settings.push_timeout_s,
        )
        self._roll, self._group = None, None
        if isinstance(engine, PooledEngine):
            self._roll = RollingSwap(engine, self._full, serving, settings)
            self._group = TrainerGroup(engine, call_timeout_s=settings.call_timeout_s)
        self._files, self._trainer_writes = PushedFiles(data_dir / PUSH), False
        self._kind = WeightKind.LORA
        self._name, self._restarts = secrets.token_hex(4), 0
        self.missed: int | None = None
        """The version that should serve, while only its trainer has its weights."""

    @property
    def name(self) -> str:
        """The engine's name, for a trainer that sends weights. It changes when the trainer has to connect anew."""
        if self._trainer_writes:
            return self._name
        return f"{self._name}-{self._restarts}" + ("" if self._group is None else f"-{self._group.name}")

    def meet(self, writes_files: bool) -> list[str] | None:
        """Note that a trainer of full weights starts. Return the URLs of a pool's engines; None: there is one engine.

        writes_files: the server gives its weights to the engines. Raises EngineGone if no engine of the pool answers.
        """
        self._trainer_writes = writes_files
        return None if self._group is None else self._group.meet(waits=not writes_files)

    async def serve(self, version: Version) -> None:
        """Make new requests take this version.

        Raises EngineError. The old version then serves, or chats are held until `EngineReadiness` restores one.
        """
        if version.kind is WeightKind.FULL:
            folder = self._files.of(version.weight_version) or self._checkpoint_of(version)
            await self._swap(version.weight_version, folder)
        else:
            await self.adapters.load(version)
            self.switch(version)

    async def receive(self, weight_version: int, transfer: Callable[[], Awaitable[None]]) -> None:
        """Serve the weights that a trainer sends while `transfer` runs.

        Raises EngineError. A transfer that failed leaves chats held.
        """
        if self._group is None:
            times = await self._full.receive(weight_version, transfer)
        else:
            times = await self._group.receive(self._full, weight_version, transfer)
        self._health.push.observe(times.push_s)
        self.missed = None
        log.info("weights_received", weight_version=weight_version, **asdict(times))

    async def take(self, version: Version, folder: str) -> None:
        """Serve the weights that a trainer wrote into a folder, relative to the data directory. Else as `serve`.

        Raises CommitRefused too, if the folder is not there.
        """
        place = await asyncio.to_thread(self._files.find, folder)
        await self._swap(version.weight_version, place)
        self._files.add(version.weight_version, place)  # not before: it may be a second try, and the first one serves
        self.missed = None

    async def _swap(self, number: int, weights: Path) -> None:
        times = await (self._roll or self._full).swap(number, weights)
        self._health.push.observe(times.push_s)
        log.info("weights_swapped", weight_version=number, **asdict(times))

    def expect_files(self, folder: str | None) -> None:
        """Leave this folder alone, relative to the data directory, while a trainer writes it; None: it has ended."""
        self._files.awaited = folder

    async def go_back(self, old: Version) -> None:
        """Serve the version from before again, because a newer one failed its test; hold chats if that fails."""
        try:
            if self._is_on_disk(old):
                await self.serve(old)
                return
        except EngineError as error:
            log.warning("old_version_not_taken", weight_version=old.weight_version, error=str(error))
        self.mark_untrusted()

    async def note_files(self, serving: Version) -> None:
        """Let engines that come back take the serving version from its checkpoint; delete what was pushed before."""
        if serving.kind is not WeightKind.FULL:
            return
        number, pool = serving.weight_version, self._engine
        if isinstance(pool, PooledEngine) and pool.weights == Weights(None, number) and self._is_on_disk(serving):
            pool.weights = Weights(self._files.of(number) or self._checkpoint_of(serving), number)
        if not self._trainer_writes:  # the folders in `push/`, if any, are not of this run
            return
        if isinstance(pool, PooledEngine):
            async with pool.rolling():  # an engine that comes in may be reading one
                await self._drop_files(number, pool.weights)
        else:
            await self._drop_files(number, None)

    async def _drop_files(self, kept: int, held: Weights | None) -> None:
        folder = None if held is None else held.folder
        if problems := await asyncio.to_thread(lambda: self._files.drop(kept=kept, held=folder)):
            self._health.failed(_FILES, "; ".join(problems), at_once=True)
        else:
            self._health.ok(_FILES)

    def _is_on_disk(self, version: Version) -> bool:
        return not is_remote_only(version) or self._files.of(version.weight_version) is not None

    def _checkpoint_of(self, version: Version) -> Path:
        return version_folders.weights_of(version, self.data_dir, self._base_folder)

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

    def scores(self) -> list[Callable[..., Awaitable[LogProbs]]]:
        """Return a `score` for each engine that serves. An engine of a pool that fails it leaves: EngineLeft."""
        if isinstance(self._engine, PooledEngine):
            return [partial(self._score_on, self._engine, engine) for engine in self._engine.ready()]
        return [self.score]

    async def _score_on(
        self,
        pool: PooledEngine,
        engine: HttpEngine,
        number: int,
        prompt_ids: Ids,
        response_ids: Ids,
        *,
        user: str = KEYLESS_USER,
    ) -> LogProbs:
        score = await pool.score_on(
            engine,
            self._call_timeout_s,
            prompt_ids,
            response_ids,
            lora_path=self.serving.lora_path(number),
            extra_key=cache_salt(number, user),
        )
        return score.log_probs

    def switch(self, version: Version) -> None:
        """Give new requests of its policy this version. Where adapters are loaded on demand, it need not be loaded."""
        self.serving.switch(version.weight_version, engine_adapters.name_of(version), version.policy)

    # -- an engine that was away ---------------------------------------------------------------------------------------

    async def is_in_place(self) -> bool:
        """Return True unless the engine says that it lacks the serving version."""
        # An engine that does not answer counts as in place: `EngineReadiness` checks its health elsewhere.
        current, name = self.serving.current, self.serving.lora_path(self.serving.current)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                wanted = set(self.adapters.names) if self.adapters.most is not None else {name} - {None}
                if wanted:
                    folders = await self._engine.adapter_folders()
                    if self.adapters.most is not None:
                        wanted &= set(self.adapters.names)  # one may have left meanwhile, to make room
                    holds = folders is None or wanted <= folders.keys()
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
            self.switch(version)

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
            self.switch(version)
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
            await in_time(self._engine.resume(), self._call_timeout_s)  # a server that was killed may have paused it
            if isinstance(self._engine, PooledEngine) and number == 0 and self._base_folder is not None:
                self._engine.hold_start(self._base_folder)
            self.serving.switch(number, None)
        elif not self._is_on_disk(version):
            self.serving.switch(number, None)
            self.serving.hold(Closed.ENGINE)
            self._restarts += self.missed != number
            self.missed = number
            raise RemoteOnlyWeights(f"version {number} should serve, and only its trainer has it")
        else:
            self._restarts += self.missed is None
            await self.serve(version)
        self.missed = None

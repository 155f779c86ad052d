"""The adapters of our versions on the engine, loaded and unloaded one at a time.

Promises:

- A version is in `loaded` only after its EMA teacher is loaded too.
- An adapter of our name that another run left on the engine is replaced.
- With `most`, requests bring no more versions than that: room comes from the least recently used of those that nobody
  uses, and a load waits for one. After `PATIENCE_S` the version that was loaded first takes no new requests until it
  has left: people who chat without a pause keep nobody out for longer than a reply takes. A publication has `BESIDE`
  places more, for the version that serves and the one that is tested: people who chat all the time must not keep what
  was learned from serving.

Leaves to others: the choice of a version (`publisher`, `on_demand`); counting the replies that use one
(`engines.admission`).
"""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import structlog

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.base import Engine
from openclaw_rl.engines.put_adapter import put_adapter
from openclaw_rl.engines.version_keys import adapter_name, ema_name
from openclaw_rl.errors import EngineRefused
from openclaw_rl.telemetry.health import Health
from openclaw_rl.trainers import checkpoint
from openclaw_rl.types import Version, WeightKind

log = structlog.get_logger()

BESIDE = 2
"""Places of a publication beside those of requests."""
PATIENCE_S = 1.0
"""Wait of a request for a place before a version in use has to leave for it."""
_LOOK_S = 0.5
"""Longest wait between two looks for an adapter that nobody uses."""


def name_of(version: Version) -> str | None:
    """Return the engine's name of a version's adapter; None: its own weights answer."""
    return None if version.is_base else adapter_name(version.weight_version)


class EngineAdapters:
    """The adapters that the engine holds for us."""

    def __init__(
        self,
        engine: Engine,
        serving: VersionAdmission,
        data_dir: Path,
        *,
        call_timeout_s: float,
        most: int | None = None,
        health: Health | None = None,
    ) -> None:
        """most: versions that the engine holds for requests; None: the caller keeps count."""
        self._engine, self._serving, self._data_dir, self._call_timeout_s = engine, serving, data_dir, call_timeout_s
        self.most = most
        self._health = health or Health()
        self.loaded: set[int] = set()
        """Versions whose adapter the engine holds."""
        self._since: dict[int, float] = {}
        """Times of their loads."""
        self._leaving: set[int] = set()
        """Versions that are being unloaded: no request may begin on them."""
        self._making_room: set[int] = set()
        """Versions that leave after the replies that run on them: no request may begin on them either."""
        self._ours: dict[str, Path] = {}
        """Adapters that the engine took from us, with their folders."""
        self._changes = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the adapters that requests may use."""
        return [name for number in self.loaded - self._leaving if (name := adapter_name(number)) is not None]

    def holds(self, number: int) -> bool:
        """Return True if the engine can answer as this version now."""
        is_loaded = number in self.loaded and number not in self._leaving | self._making_room
        return is_loaded or self._serving.lora_path(number) is None

    def can_hold(self, *versions: Version) -> bool:
        """Return True if the engine has room to publish these beside the versions that are in use."""
        if self.most is None:
            return True
        needed = {version.weight_version for version in versions if not version.is_base}
        return len(needed | {number for number in self.loaded if self._serving.users(number)}) <= self.most + BESIDE

    async def load(self, version: Version, *, on_demand: bool = False) -> None:
        """Load the version's adapter and its EMA teacher. Full weights and the base have none. Raises EngineError.

        Waits for room, with `most`. on_demand: for a request, which has no place of a publication.
        """
        number, name = version.weight_version, adapter_name(version.weight_version)
        if version.is_base:
            self._serving.name(number, None)
            return
        if name is None or version.kind is WeightKind.FULL:
            return
        started, leaves = time.monotonic(), None
        try:
            while True:
                async with self._changes:
                    if number in self.loaded:
                        self._making_room.discard(number)
                        return
                    if await self._has_made_room(on_demand):
                        return await self._load(version, name)
                if on_demand and leaves not in self._making_room and time.monotonic() - started >= PATIENCE_S:
                    leaves = min(self.loaded - self._making_room, key=self._since.__getitem__, default=None)
                    self._making_room |= set() if leaves is None else {leaves}
                # Without the lock: a publication has places of its own, while a request waits for one.
                await self._serving.changed(_LOOK_S)
        finally:
            self._making_room -= set() if leaves is None else {leaves}

    async def _load(self, version: Version, name: str) -> None:
        number = version.weight_version
        if version.folder is None:
            raise EngineRefused(f"version {number} has no folder", status=400)
        started, folder = time.perf_counter(), self._data_dir / version.folder
        if await asyncio.to_thread((folder / checkpoint.EMA_FOLDER).is_dir):
            await self._load_as(ema_name(number), folder / checkpoint.EMA_FOLDER)
            self._serving.add_ema(number)
        await self._load_as(name, folder)  # last: a version in `loaded` has its teacher
        self.loaded.add(number)
        self._since[number] = time.monotonic()
        self._health.push.observe(time.perf_counter() - started)

    async def _load_as(self, name: str, folder: Path) -> None:
        async with asyncio.timeout(self._call_timeout_s):
            await put_adapter(self._engine, name, folder, self._ours)
        self._ours[name] = folder

    async def _has_made_room(self, on_demand: bool) -> bool:
        """Unload the least recently used versions that nobody uses, until one more fits. False: too many are used."""
        if self.most is None:
            return True
        # The two of a publication count for requests too: one more adapter in use might keep the next publication out.
        places = self.most + (0 if on_demand else BESIDE)
        if sum(bool(self._serving.users(number)) for number in self.loaded) >= places:
            return False  # and no version leaves in vain
        while len(self.loaded) >= places:
            if not await self._unload_oldest():
                return False
        return True

    async def _unload_oldest(self) -> bool:
        """Unload the least recently used version that nobody uses. Return False if each is used."""
        idle = [number for number in self.loaded if not self._serving.users(number)]
        if idle:
            await self._unload(min(idle, key=lambda one: (one not in self._making_room, self._serving.last_used(one))))
        return bool(idle)

    async def unload(self, number: int) -> None:
        """Unload the version's adapter and its EMA teacher, if they are loaded."""
        async with self._changes:
            if number in self.loaded:
                await self._unload(number)

    async def unload_idle(self, number: int) -> bool:
        """Unload a version unless a request uses it by now. Return True if it was unloaded."""
        async with self._changes:
            if number not in self.loaded or self._serving.users(number):
                return False
            await self._unload(number)
            return True

    async def _unload(self, number: int) -> None:
        name = adapter_name(number)
        if name is None:
            return
        self._leaving.add(number)  # first: a request that comes meanwhile waits until it is loaded again
        try:
            for loaded in (ema_name(number), name) if self._serving.has_ema(number) else (name,):
                try:
                    async with asyncio.timeout(self._call_timeout_s):
                        await self._engine.unload_adapter(loaded)
                except EngineRefused as error:  # an engine that was restarted does not know it
                    log.info("adapter_already_gone", weight_version=number, adapter=loaded, error=str(error))
            self._serving.drop_ema(number)
            self._serving.unloaded(number)
            self.loaded.discard(number)
        finally:
            self._leaving.discard(number)

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget the folders of versions whose weights were deleted."""
        for number in numbers:
            self._ours.pop(adapter_name(number) or "", None)
            self._ours.pop(ema_name(number), None)

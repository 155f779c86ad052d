"""The adapters that the engine holds for us: which versions, from which folders, loaded and let go one at a time.

Promises: a version that is loaded has its EMA teacher loaded before it; an adapter of our name that another run left on
the engine is replaced. Leaves to others: when a version may be let go (`publisher`, which counts no replies either:
`engines.serving` does).
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import structlog

from openclaw_rl.engines.base import Engine
from openclaw_rl.engines.serving import ServingVersions, adapter_name, ema_name
from openclaw_rl.errors import EngineRefused
from openclaw_rl.trainers import checkpoint
from openclaw_rl.types import Version, WeightKind

log = structlog.get_logger()


class EngineAdapters:
    def __init__(self, engine: Engine, serving: ServingVersions, data_dir: Path, *, call_timeout_s: float) -> None:
        self._engine, self._serving, self._data_dir, self._call_timeout_s = engine, serving, data_dir, call_timeout_s
        self.loaded: set[int] = set()
        """Versions."""
        self._ours: dict[str, Path] = {}
        """Adapters that the engine took from us, and from where."""

    async def load(self, version: Version) -> None:
        number, name = version.weight_version, adapter_name(version.weight_version)
        if name is None or number in self.loaded or version.kind is WeightKind.FULL:
            return
        if version.folder is None:
            raise EngineRefused(f"version {number} has no folder", status=400)
        folder = self._data_dir / version.folder
        if await asyncio.to_thread((folder / checkpoint.EMA_FOLDER).is_dir):
            await self._load_as(ema_name(number), folder / checkpoint.EMA_FOLDER)
            self._serving.add_ema(number)
        await self._load_as(name, folder)  # last: what is in `loaded` has its teacher
        self.loaded.add(number)

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
        """Whether the adapter that the engine has under this name is ours: an attached engine outlives us, and may
        have served another data directory. A folder is never rewritten.
        """
        folders = await self._engine.adapter_folders()
        if folders is None:  # it does not say: then what it took from us is ours
            return self._ours.get(name) == folder
        return folders.get(name) == str(folder)

    async def unload(self, number: int) -> None:
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
        """Their weights are deleted: they are never loaded again."""
        for number in numbers:
            self._ours.pop(adapter_name(number) or "", None)
            self._ours.pop(ema_name(number), None)

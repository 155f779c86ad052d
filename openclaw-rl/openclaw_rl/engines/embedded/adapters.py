"""The loaded adapters by name, and who uses them. Lives on the event loop.

A request holds its adapter from arrival to end, so an unload that waits for the holders never pulls weights from under
a reply. From the moment an unload is asked for, the name is unknown to new requests.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from openclaw_rl.engines.embedded.runner import Adapter
from openclaw_rl.errors import EngineRefused


class Adapters:
    def __init__(self, load: Callable[[str, Path], Adapter], drop: Callable[[Adapter], Awaitable[None]]) -> None:
        """load: reads a PEFT folder, in a thread of its own. drop: forgets an adapter that nobody uses any more."""
        self._load, self._drop = load, drop
        self._loaded: dict[str, Adapter] = {}
        self._folders: dict[str, Path] = {}
        self._loading: set[str] = set()
        self._users: dict[Adapter, int] = {}
        self._idle: dict[Adapter, asyncio.Event] = {}
        """Set when the last user of an adapter that is being unloaded lets go."""

    @property
    def names(self) -> list[str]:
        return list(self._loaded)

    @property
    def folders(self) -> dict[str, Path]:
        """Name → folder it was loaded from."""
        return {name: self._folders[name] for name in self._loaded}

    async def load(self, name: str, folder: Path) -> None:
        if name in self._loaded or name in self._loading:
            raise EngineRefused(f"LoRA adapter {name!r} is already loaded", status=400)
        self._loading.add(name)
        try:
            self._loaded[name] = await asyncio.to_thread(self._load, name, folder)
            self._folders[name] = folder
        finally:
            self._loading.discard(name)

    async def unload(self, name: str) -> None:
        """Returns when its last request has ended and it is gone."""
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            raise EngineRefused(f"LoRA adapter {name!r} is not loaded", status=400)
        if adapter in self._users:
            self._idle[adapter] = asyncio.Event()
            await self._idle[adapter].wait()
            del self._idle[adapter]
        await self._drop(adapter)

    def hold(self, name: str | None) -> Adapter | None:
        """The adapter, until `release`; None for the base."""
        if name is None:
            return None
        loaded = self._loaded.get(name)
        if loaded is None:
            raise EngineRefused(
                f"LoRA adapter {name!r} is not loaded; loaded: {', '.join(self._loaded) or 'none'}", status=400
            )
        self._users[loaded] = self._users.get(loaded, 0) + 1
        return loaded

    def release(self, adapter: Adapter) -> None:
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            if adapter in self._idle:
                self._idle[adapter].set()

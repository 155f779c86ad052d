"""Who serves new requests, who still uses which version, and the gate that holds requests while the engine is away.

Promises: a reply keeps the version it started with; a version is free to unload when `drained` returns; nobody is
refused while the gate is closed for less than `hold_s`. State changes happen without an await in between, on one
event loop. Which versions are loaded, and when, is the publisher's business.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from openclaw_rl.errors import RequestError


@dataclass(frozen=True, slots=True)
class VersionUse:
    """A running reply's or scoring call's hold on one version."""

    weight_version: int
    lora_path: str | None
    extra_key: str


def adapter_name(weight_version: int) -> str | None:
    """The engine's name of a version's adapter; None: the base."""
    return f"policy-v{weight_version}" if weight_version else None


class ServingVersions:
    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._current: int | None = None
        self._lora_paths: dict[int, str | None] = {}
        self._gate_closed = False
        self._open = asyncio.Event()
        """Set while the gate is open *and* there is a version to serve."""
        self._users: Counter[int] = Counter()
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}

    def switch(self, weight_version: int, lora_path: str | None) -> None:
        """New requests get this version from now on."""
        self._current = weight_version
        self._lora_paths[weight_version] = lora_path
        self._update_gate()

    @property
    def current(self) -> int:
        if self._current is None:
            raise RuntimeError("no version serves yet")
        return self._current

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def close_gate(self) -> None:
        """New and cut requests wait: the engine is down, or its weights are being replaced."""
        self._gate_closed = True
        self._update_gate()

    def open_gate(self) -> None:
        self._gate_closed = False
        self._update_gate()

    @asynccontextmanager
    async def use(self, weight_version: int | None = None) -> AsyncIterator[VersionUse]:
        """Hold a version: the current one, or the one named (a scoring call, a reply that resumes).

        Waits while the gate is closed. Raises RequestError (503, `engine_unavailable`) after `hold_s`.
        """
        await self.wait_open()
        version = self.current if weight_version is None else weight_version
        lora_path = self._lora_paths.get(version, adapter_name(version))
        self._users[version] += 1
        try:
            yield VersionUse(version, lora_path, f"v{version}")
        finally:
            self._leave(version)

    async def wait_open(self) -> None:
        """Return once the gate is open. Raises RequestError (503, `engine_unavailable`) after `hold_s`."""
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(self._hold_s):
                while not self._open.is_set():  # it may close again before we run
                    await self._open.wait()
        except TimeoutError as error:
            raise RequestError(
                "the engine is not available; try again", status=503, code="engine_unavailable"
            ) from error

    @property
    def hold_s(self) -> float:
        """How long a request waits for the engine."""
        return self._hold_s

    def still_serves(self, use: VersionUse) -> bool:
        """Whether a reply that was cut can go on under its version, as far as we know: not after its full weights
        were replaced.
        """
        return use.weight_version == self.current or (use.lora_path, self._lora_paths[self.current]) != (None, None)

    def users(self, weight_version: int) -> int:
        return self._users[weight_version]

    async def drained(self, weight_version: int) -> None:
        """Return when nobody uses the version. New users may come while it is current."""
        while self._users[weight_version]:
            free = asyncio.get_running_loop().create_future()
            waiting = self._waiting.setdefault(weight_version, set())
            waiting.add(free)
            try:
                await free
            finally:
                waiting.discard(free)

    def _leave(self, version: int) -> None:
        self._users[version] -= 1
        if self._users[version]:
            return
        del self._users[version]
        for free in self._waiting.pop(version, ()):
            if not free.done():
                free.set_result(None)

    def _update_gate(self) -> None:
        if self._current is not None and not self._gate_closed:
            self._open.set()
        else:
            self._open.clear()

"""Who serves new requests, who still uses which version, and the gate that holds requests while the engine is away.

Promises: a reply keeps the version it started with; a version is free to unload when `drained` returns; nobody is
refused while the gate is closed for less than `hold_s`. State changes happen without an await in between, on one
event loop. Which versions are loaded, and when, is the publisher's business.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum, auto

from openclaw_rl.errors import EngineRefused, RequestError


class Closed(Enum):
    """Why the gate is shut; it is open when nobody shuts it."""

    ENGINE = auto()
    """The engine is down."""
    SWAP = auto()
    """The engine's own weights are being replaced."""


@dataclass(frozen=True, slots=True)
class VersionUse:
    """A running reply's or scoring call's hold on one version."""

    weight_version: int
    lora_path: str | None
    extra_key: str
    ema_path: str | None = None
    """The version's EMA teacher; where it has none of its own, that is the version itself."""


def adapter_name(weight_version: int) -> str | None:
    """The engine's name of a version's adapter; None: the base."""
    return f"policy-v{weight_version}" if weight_version else None


def ema_name(weight_version: int) -> str:
    """The engine's name of a version's EMA teacher. It lives as long as its version, and answers scoring alone."""
    return f"ema-v{weight_version}"


def is_unknown_adapter(error: EngineRefused, lora_path: str | None) -> bool:
    """A 4xx because the engine has the adapter no longer. Its words differ by engine and version; the name is in
    them."""
    said = error.message
    return lora_path is not None and "already" not in said and (lora_path in said or "never been loaded" in said)


class VersionAdmission:
    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._current: int | None = None
        self._lora_paths: dict[int, str | None] = {}
        """Where it is not the adapter of the version's own name."""
        self._emas: set[int] = set()
        self._closed: set[Closed] = set()
        self._open = asyncio.Event()
        """Set while the gate is open *and* there is a version to serve."""
        self._users: Counter[int] = Counter()
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self._not_resumable = 0
        self._parked = 0
        self._changed = asyncio.Event()
        """Set whenever a use ends or parks."""

    def switch(self, weight_version: int, lora_path: str | None) -> None:
        """New requests get this version from now on."""
        self._current = weight_version
        if lora_path == adapter_name(weight_version):
            self._lora_paths.pop(weight_version, None)
        else:
            self._lora_paths[weight_version] = lora_path
        self._update_gate()

    @property
    def current(self) -> int:
        if self._current is None:
            raise RuntimeError("no version serves yet")
        return self._current

    def lora_path(self, weight_version: int) -> str | None:
        """The adapter that answers as this version; None where the engine's own weights do."""
        return self._lora_paths.get(weight_version, adapter_name(weight_version))

    def add_ema(self, weight_version: int) -> None:
        """The version's EMA teacher is loaded beside it."""
        self._emas.add(weight_version)

    def drop_ema(self, weight_version: int) -> None:
        self._emas.discard(weight_version)

    def has_ema(self, weight_version: int) -> bool:
        return weight_version in self._emas

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def is_closed_for(self, why: Closed) -> bool:
        return why in self._closed

    def hold(self, why: Closed = Closed.ENGINE) -> None:
        """New and cut requests wait until everyone who shut the gate has opened it again."""
        self._closed.add(why)
        self._update_gate()

    def release_hold(self, why: Closed = Closed.ENGINE) -> None:
        self._closed.discard(why)
        self._update_gate()

    @asynccontextmanager
    async def use(
        self, weight_version: int | None = None, *, is_not_resumable: bool = False, within_s: float | None = None
    ) -> AsyncIterator[VersionUse]:
        """Hold a version: the current one, or the one named (a scoring call, a reply that resumes).

        is_not_resumable: it should not be cut and resumed (a grammar, a seed): a swap gives it time to finish.
        Waits while the gate is closed. Raises RequestError (503, `engine_unavailable`) after `hold_s`, or `within_s`
        for who has waited before.
        """
        await self.wait_open(within_s)
        version = self.current if weight_version is None else weight_version
        lora_path = self.lora_path(version)
        self._users[version] += 1
        self._not_resumable += is_not_resumable
        try:
            ema_path = ema_name(version) if version in self._emas else lora_path
            yield VersionUse(version, lora_path, f"v{version}", ema_path)
        finally:
            self._not_resumable -= is_not_resumable
            self._leave(version)

    @contextmanager
    def parked(self) -> Iterator[None]:
        """A use that asks nothing of the engine now: a cut reply at the gate."""
        self._parked += 1
        self._changed.set()
        try:
            yield
        finally:
            self._parked -= 1

    @property
    def calls(self) -> int:
        """Uses that may have something running on the engine."""
        return self._users.total() - self._parked

    @property
    def not_resumable(self) -> int:
        """Uses that would not survive a cut whole."""
        return self._not_resumable

    async def changed(self, timeout_s: float) -> None:
        """Return when a use ended or parked, or after the timeout."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def wait_open(self, within_s: float | None = None) -> None:
        """Return once the gate is open. Raises RequestError (503, `engine_unavailable`) after `hold_s`, or within_s."""
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(self._hold_s if within_s is None else within_s):
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
        return use.weight_version == self.current or (use.lora_path, self.lora_path(self.current)) != (None, None)

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
        self._changed.set()
        if self._users[version]:
            return
        del self._users[version]
        for free in self._waiting.pop(version, ()):
            if not free.done():
                free.set_result(None)

    def _update_gate(self) -> None:
        if self._current is not None and not self._closed:
            self._open.set()
        else:
            self._open.clear()

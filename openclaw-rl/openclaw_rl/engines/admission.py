"""Admission of requests: the version of each, the users of each version, and the gate that holds requests.

Promises: a reply keeps the version that it started with. A version is free to unload when `drained` returns. The gate
refuses a request only after `hold_s`. A request of a policy gets a version of that policy, and waits for its adapter
where a `Loader` is set. State changes happen without an await in between, on one event loop. The publisher decides
which versions are loaded, and when.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import Protocol

from openclaw_rl.backoff import Backoff
from openclaw_rl.engines.version_keys import adapter_name, cache_salt, ema_name
from openclaw_rl.errors import EngineError, EngineRefused, RequestError
from openclaw_rl.types import SHARED_POLICY

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
"""Pauses of a request whose adapter could not be loaded, because the engine was away."""


class Closed(Enum):
    """Reasons to close the gate. It is open while no reason holds."""

    ENGINE = auto()
    """The engine is down."""
    SWAP = auto()
    """The engine's own weights are being replaced."""


@dataclass(frozen=True, slots=True)
class VersionUse:
    """The hold of a running reply or scoring call on one version."""

    weight_version: int
    lora_path: str | None
    extra_key: str
    ema_path: str | None = None
    """The version's EMA teacher; for a version without its own, the version itself."""
    policy: str = SHARED_POLICY

    def cache_of(self, user: str) -> str:
        """Return the `extra_key` of calls with a prompt of this user."""
        return cache_salt(self.weight_version, user)


def is_unknown_adapter(error: EngineRefused, lora_path: str | None) -> bool:
    """Return True for a 4xx that says the engine no longer has the adapter."""
    # The words differ by engine and version, but the adapter's name is in them.
    said = error.message
    return lora_path is not None and "already" not in said and (lora_path in said or "never been loaded" in said)


class Loader(Protocol):
    """Brings policies' versions to the engine when requests need them."""

    def holds(self, weight_version: int) -> bool:
        """Return True if the engine can answer as this version now."""
        ...

    async def bring(self, policy: str, weight_version: int | None, *, opens: bool) -> None:
        """Return when the engine held this version a moment ago; None: the one that should serve the policy.

        opens: open the policy if it is new.

        Raises EngineError; RequestError when the version cannot be loaded at all.
        """
        ...


class VersionAdmission:
    """The serving version of each policy, the versions' users, and the gate."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._current: dict[str, int] = {}
        """The serving version of each policy that was asked for."""
        self.loader: Loader | None = None
        """None: every version that serves is on the engine all the time, and the shared policy answers for the others
        (a server with one policy, a replay of turns)."""
        self._lora_paths: dict[int, str | None] = {}
        """Adapters of the versions that are not served by the adapter of their own name."""
        self._emas: set[int] = set()
        self._closed: set[Closed] = set()
        self._open = asyncio.Event()
        """Set while the gate is open *and* a version serves."""
        self._users: Counter[int] = Counter()
        self._used: dict[int, int] = {}
        """Place of each version's last use in the order of all uses."""
        self._order = count()
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self._not_resumable = 0
        self._parked = 0
        self._changed = asyncio.Event()
        """Set whenever a use ends or parks."""

    def switch(self, weight_version: int, lora_path: str | None, policy: str = SHARED_POLICY) -> None:
        """Give new requests of a policy this version from now on."""
        self._current[policy] = weight_version
        self.name(weight_version, lora_path)
        self._update_gate()

    def name(self, weight_version: int, lora_path: str | None) -> None:
        """Note the adapter that answers as this version; None: the engine's own weights."""
        if lora_path == adapter_name(weight_version):
            self._lora_paths.pop(weight_version, None)
        else:
            self._lora_paths[weight_version] = lora_path

    @property
    def current(self) -> int:
        """The serving version of the shared policy."""
        if SHARED_POLICY not in self._current:
            raise RuntimeError("no version serves yet")
        return self._current[SHARED_POLICY]

    @property
    def currents(self) -> Mapping[str, int]:
        """The serving version of each policy that was asked for since the start."""
        return self._current

    def close_policy(self, policy: str) -> None:
        """Forget a policy's serving version: the next request asks for it anew."""
        self._current.pop(policy, None)

    def lora_path(self, weight_version: int) -> str | None:
        """Return the adapter that answers as this version; None: the engine's own weights."""
        return self._lora_paths.get(weight_version, adapter_name(weight_version))

    def add_ema(self, weight_version: int) -> None:
        """Note that the version's EMA teacher is loaded beside it."""
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
        """Close the gate: new and cut requests wait until `release_hold` has withdrawn every reason."""
        self._closed.add(why)
        self._update_gate()

    def release_hold(self, why: Closed = Closed.ENGINE) -> None:
        self._closed.discard(why)
        self._update_gate()

    @asynccontextmanager
    async def use(
        self,
        weight_version: int | None = None,
        *,
        policy: str = SHARED_POLICY,
        opens: bool = True,
        is_not_resumable: bool = False,
        within_s: float | None = None,
    ) -> AsyncIterator[VersionUse]:
        """Hold a version: the current one of a policy, or a named one (for a scoring call or a reply that resumes).

        opens: False for work that no user waits for: it must not open the policy of a user who was forgotten.
        is_not_resumable: the reply should not be cut and resumed (a grammar, a seed), so a swap gives it time to
        finish. within_s: the rest of `hold_s`, for a request that has waited before. Waits while the gate is closed,
        and for an adapter that is not on the engine. Raises RequestError (503, `engine_unavailable`) after `hold_s` or
        `within_s`.
        """
        version = await self._ready(weight_version, policy, within_s, opens=opens)
        lora_path = self.lora_path(version)
        with self.held(version):  # without an await since the version was ready
            self._not_resumable += is_not_resumable
            try:
                ema_path = ema_name(version) if version in self._emas else lora_path
                yield VersionUse(version, lora_path, cache_salt(version), ema_path, policy)
            finally:
                self._not_resumable -= is_not_resumable

    async def _ready(self, weight_version: int | None, policy: str, within_s: float | None, *, opens: bool) -> int:
        """Return the version to use once the gate is open and the engine holds it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + (self._hold_s if within_s is None else within_s)
        await self.wait_open(within_s)
        if self.loader is None:
            return self._current.get(policy, self.current) if weight_version is None else weight_version
        pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            await self.wait_open(max(0.0, end - loop.time()))
            version = self._current.get(policy) if weight_version is None else weight_version
            if version is not None and self.loader.holds(version):
                return version
            try:
                async with asyncio.timeout_at(end):
                    try:
                        await self.loader.bring(policy, weight_version, opens=opens)
                    except EngineError:  # it is away: the gate closes meanwhile, or it comes back at once
                        await asyncio.sleep(pauses.next_s())
            except TimeoutError as error:
                raise _unavailable() from error

    @contextmanager
    def held(self, weight_version: int) -> Iterator[None]:
        """Keep a version loaded meanwhile, as a reply does. It must be loaded now, or be loaded by the caller."""
        self._users[weight_version] += 1
        try:
            yield
        finally:
            if self.loader is not None:
                self._used[weight_version] = next(self._order)
            self._leave(weight_version)

    def last_used(self, weight_version: int) -> int:
        """Return a number that is larger for a version whose use ended later; -1: none since it was loaded."""
        return self._used.get(weight_version, -1)

    def unloaded(self, weight_version: int) -> None:
        """Forget the uses of a version that left the engine."""
        self._used.pop(weight_version, None)

    @contextmanager
    def parked(self) -> Iterator[None]:
        """Mark a use that makes no engine call now: a cut reply that waits at the gate."""
        self._parked += 1
        self._changed.set()
        try:
            yield
        finally:
            self._parked -= 1

    @property
    def calls(self) -> int:
        """Number of uses that may have a request on the engine."""
        return self._users.total() - self._parked

    @property
    def not_resumable(self) -> int:
        """Number of uses that a swap should not cut."""
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
        """Wait for an open gate. Raises RequestError (503, `engine_unavailable`) after `hold_s` or `within_s`."""
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(self._hold_s if within_s is None else within_s):
                while not self._open.is_set():  # it may close again before we run
                    await self._open.wait()
        except TimeoutError as error:
            raise _unavailable() from error

    @property
    def hold_s(self) -> float:
        """Seconds that a request waits for the engine."""
        return self._hold_s

    def still_serves(self, use: VersionUse) -> bool:
        """Return False if the full weights of a cut reply's version were replaced, so that it cannot go on."""
        current = self._current.get(use.policy)
        if current is None or use.weight_version == current or self.loader is not None:  # adapters replace no other
            return True
        return (use.lora_path, self.lora_path(current)) != (None, None)

    def users(self, weight_version: int) -> int:
        return self._users[weight_version]

    async def drained(self, weight_version: int) -> None:
        """Return when the version has no users. New users may come while it is current."""
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
        if SHARED_POLICY in self._current and not self._closed:
            self._open.set()
        else:
            self._open.clear()


def _unavailable() -> RequestError:
    return RequestError("the engine is not available; try again", status=503, code="engine_unavailable")

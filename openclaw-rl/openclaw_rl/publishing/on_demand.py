"""Adapters on demand: the version of a user's policy comes to the engine when a request needs it.

The engine holds few adapters, and users may be many. A request whose version is not there waits until this task has
loaded it; requests of one policy share one load. A policy that nobody asked for before is opened in the ledger.

Promises:

- A policy's requests get the version that the ledger names for it, never another's, and never the base in silence.
- A client that leaves cancels its wait alone: the load belongs to this task.
- A policy that the base answers needs no place on the engine, and waits for no load that does.

Leaves to others: room on the engine (`engine_adapters`); the waiting and its deadline (`engines.admission`).
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from openclaw_rl.errors import EngineError, EngineGone, EngineRefused, LedgerError, RequestError
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing.engine_weights import PolicyEngine
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import Version

log = structlog.get_logger()

PART = "adapters"
"""Name of the part in `Health` that is out of order while a version cannot be loaded."""

_Wanted = tuple[str, int | None, bool]
"""A policy; its version, None: the one that should serve; True if the policy may be opened."""


class OnDemand:
    """Implements `engines.admission.Loader`. The app owns `run`."""

    def __init__(
        self,
        ledger: Ledger,
        policy: PolicyEngine,
        *,
        start: Callable[[], Awaitable[int]],
        health: Health | None = None,
    ) -> None:
        """start: the version whose weights a new policy begins with."""
        self._ledger, self._policy, self._start = ledger, policy, start
        self._health = health or Health()
        self._wanted: dict[_Wanted, asyncio.Future[None]] = {}
        """Loads that requests wait for, oldest first: at most one for each policy and version in use."""
        self._asked = asyncio.Event()
        self._loads: dict[_Wanted, None] = {}
        """Those that need a place on the engine, oldest first."""
        self._to_load = asyncio.Event()

    def holds(self, weight_version: int) -> bool:
        return self._policy.adapters.holds(weight_version)

    async def bring(self, policy: str, weight_version: int | None, *, opens: bool) -> None:
        key = (policy, weight_version, opens)
        future = self._wanted.get(key)
        if future is None:
            future = self._wanted[key] = asyncio.get_running_loop().create_future()
            self._asked.set()
        await asyncio.shield(future)

    async def run(self) -> None:
        """Bring what requests wait for, until cancelled: adapters one after the other, and beside them the base."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sort(), name="sort requests for adapters")
            tasks.create_task(self._load(), name="load adapters")

    async def _sort(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            for key in [key for key in self._wanted if key not in self._loads]:
                if await self._needs_place(*key):
                    self._loads[key] = None
                    self._to_load.set()
                else:
                    await self._answer(key)

    async def _load(self) -> None:
        while True:
            await self._to_load.wait()
            self._to_load.clear()
            while self._loads:
                await self._answer(next(iter(self._loads)))

    async def _answer(self, key: _Wanted) -> None:
        error = await self._brought(*key)
        self._loads.pop(key, None)
        future = self._wanted.pop(key)
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # retrieved: every client may have left

    async def _needs_place(self, policy: str, weight_version: int | None, opens: bool) -> bool:
        number = self._policy.serving.currents.get(policy) if weight_version is None else weight_version
        try:
            version = await (self._version_of(policy, opens) if number is None else self._ledger.version(number))
        except LedgerError:
            return False  # `_brought` says it
        return not version.is_base

    async def _brought(self, policy: str, weight_version: int | None, opens: bool) -> Exception | None:
        """Load a version. Return the error of those that wait for it."""
        try:
            if weight_version is None:
                await self._bring_serving(policy, opens)
            else:
                await self._policy.adapters.load(await self._ledger.version(weight_version), on_demand=True)
        except EngineRefused as error:
            # The files are at fault. Neither the base nor another version may answer in this one's place.
            log.error("version_not_loaded", policy=policy, error=str(error))
            self._health.failed(PART, f"a version of {policy} cannot be loaded: {error}", at_once=True)
            return RequestError(
                "the weights of your policy cannot be loaded; the operator knows", status=503, code="policy_unavailable"
            )
        except LedgerError as error:
            return RequestError(f"your policy cannot be read now: {error}", status=503, code="policy_unavailable")
        except TimeoutError:
            return EngineGone("the engine did not load an adapter in time")
        except EngineError as error:
            return error
        self._health.ok(PART)
        return None

    async def _bring_serving(self, policy: str, opens: bool) -> None:
        """Load the version that serves a policy; choose it if the policy was not asked for since the start."""
        serving = self._policy.serving
        while (current := serving.currents.get(policy)) is None:
            version = await self._version_of(policy, opens)
            await self._policy.adapters.load(version, on_demand=True)
            if policy in serving.currents:  # the publisher chose meanwhile
                continue
            self._policy.switch(version)
            # A rollback may have come between the ledger's answer and the switch; a later one finds the policy here.
            try:
                if (await self._ledger.target(policy)).weight_version == serving.currents.get(policy):
                    return
            except LedgerError:  # its user was forgotten meanwhile
                serving.close_policy(policy)
                raise
            serving.close_policy(policy)
        if not self.holds(current):
            await self._policy.adapters.load(await self._ledger.version(current), on_demand=True)

    async def _version_of(self, policy: str, opens: bool) -> Version:
        """Return the version that should serve a policy, which is opened if it is new and may be."""
        if policy not in await self._ledger.policies():
            if not opens:
                raise LedgerError(f"there is no policy {policy!r}")
            opened = await self._ledger.open_policy(policy, start=await self._start())
            log.info("policy_opened", policy=policy, root=opened.weight_version, start=opened.same_weights_as)
        return await self._ledger.target(policy)

"""A pool of engines that every other part of the server sees as one `engines.base.Engine`.

Promises:

- A conversation stays on the engine that holds its prefix (`GenerateRequest.affinity`). Other calls go to the engine
  with the fewest calls.
- An engine whose call fails gets no new request until a look has found it in order. A call that had no token yet goes
  to another engine at once; a reply that was cut is the caller's to resume, and meets another engine.
- An engine gets requests only while it holds every adapter, and the full weights, that the pool took. One that comes
  back loads them first. No reply comes from an engine that lacks the named adapter.
- An adapter is loaded on every engine of the pool before `load_adapter` returns. An engine that dies or hangs meanwhile
  leaves the pool, and the others go on.
- With full weights, a request goes to an engine that holds its version. Two versions may serve at once, while engines
  take new weights one after the other (`publishing.rolling_swap`).
- A request is aborted on the engine that runs it.

Leaves to others: the version of each request, and holding chats while no engine is in order (`engines.admission`,
`server.engine_readiness`); resuming a reply that was cut (`proxy.generation`); the operator's choice of engines
(`pool_drains`).
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar

import structlog

from openclaw_rl.engines.base import Score, Tap
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.dialect import GenerateReply, GenerateRequest, ModelInfo
from openclaw_rl.engines.pictures import Album
from openclaw_rl.engines.pool_member import DRAINED, EMPTY, STRANGER, EngineStatus, Member, Tried, Weights, stranger_of
from openclaw_rl.engines.version_keys import version_of
from openclaw_rl.errors import EngineGone, EngineLeft, EngineRefused
from openclaw_rl.types import Ids

log = structlog.get_logger()
T = TypeVar("T")

POLL_S, DOWN_AFTER = 1.0, 3
MOST_HOMES = 20_000
"""Conversations whose engine is remembered; the least recently used one is forgotten."""


class PooledEngine:
    """Several engines of one model, as one. The app owns `run`."""

    def __init__(
        self, engines: Sequence[HttpEngine], *, change_s: float, is_full: bool = False, poll_s: float = POLL_S
    ) -> None:
        """change_s: time for one engine to take or lose an adapter, or to pause. is_full: versions are full weights."""
        self._members = tuple(Member(engine) for engine in engines)
        self._is_full = is_full
        self._change_s, self._poll_s = change_s, poll_s
        self._adapters: dict[str, Path] = {}
        """Adapters that every engine in the pool holds."""
        self.weights: Weights | None = None
        """Those that every engine has to hold; None: those of their start."""
        self._model: ModelInfo | None = None
        self._homes, self._order = OrderedDict[str, Member](), count(1)
        self._changes = asyncio.Lock()
        self._is_paused = False

    @property
    def url(self) -> str:
        """URL of the first engine."""
        return self._members[0].url

    def show(self, album: Album) -> None:
        """Give the engines the pictures of the prompts that they score."""
        for member in self._members:
            member.engine.show(album)

    async def aclose(self) -> None:
        await asyncio.gather(*(member.engine.aclose() for member in self._members))

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def stream(self, request: GenerateRequest, tap: Tap | None = None) -> AsyncGenerator[GenerateReply, None]:
        tried = Tried(request.lora_path)
        while True:
            member, has_begun = self._choose(request.affinity, request.extra_key, tried), False
            with member.call() as joins:
                try:
                    async with aclosing(member.engine.stream(request, tap)) as events:
                        async for reply in events:
                            has_begun = True
                            yield reply
                    tried.worked(member)
                    return
                except (EngineGone, EngineRefused) as error:
                    if not tried.may_go_on(member, joins, error, self._adapters, self.members) or not self.members:
                        raise
                    if has_begun:
                        self._homes.pop(request.affinity or "", None)
                        raise EngineLeft(str(error)) from error

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        return await self._ask(
            lambda engine: engine.generate(request), request.lora_path, request.extra_key, request.affinity
        )

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score:
        def ask(engine: HttpEngine) -> Awaitable[Score]:
            return engine.score(prompt_ids, response_ids, lora_path=lora_path, extra_key=extra_key, top_k=top_k)

        return await self._ask(ask, lora_path, extra_key)

    async def score_ids(
        self, prompt_ids: Ids, response_ids: Ids, ids: Sequence[Ids], *, lora_path: str | None, extra_key: str | None
    ) -> Score:
        def ask(engine: HttpEngine) -> Awaitable[Score]:
            return engine.score_ids(prompt_ids, response_ids, ids, lora_path=lora_path, extra_key=extra_key)

        return await self._ask(ask, lora_path, extra_key)

    async def score_on(
        self, engine: HttpEngine, within_s: float, prompt: Ids, ids: Ids, *, lora_path: str | None, extra_key: str
    ) -> Score:
        """Score on one engine. If it fails while others serve, it leaves the pool: raises EngineLeft."""
        joins = (member := next(one for one in self._members if one.engine is engine)).joins
        try:
            async with asyncio.timeout(within_s):
                return await engine.score(prompt, ids, lora_path=lora_path, extra_key=extra_key)
        except (EngineGone, EngineRefused, TimeoutError) as error:
            if self.members == [member]:
                raise
            if not isinstance(error, EngineRefused):
                if member.joins == joins:  # else it has come back since, and was found in order
                    member.failed(str(error) or f"it did not answer within {within_s:g} s")
            elif not Tried(lora_path).may_go_on(member, joins, error, self._adapters, self.members):
                raise
            raise EngineLeft(f"{member.url}: {member.fault}") from error

    async def _ask(
        self,
        call: Callable[[HttpEngine], Awaitable[T]],
        lora_path: str | None,
        extra_key: str | None,
        affinity: str | None = None,
    ) -> T:
        tried = Tried(lora_path)
        while True:
            member = self._choose(affinity, extra_key, tried)
            with member.call() as joins:
                try:
                    answer = await call(member.engine)
                    tried.worked(member)
                    return answer
                except (EngineGone, EngineRefused) as error:
                    if not tried.may_go_on(member, joins, error, self._adapters, self.members):
                        raise

    def _choose(self, affinity: str | None, extra_key: str | None, tried: Container[Member]) -> Member:
        """Return the engine of the conversation, else the least loaded. Raises EngineGone when none may be asked."""
        ready = [one for one in self._members if one.is_in and not one.is_aside and one not in tried]
        if self._is_full and (version := version_of(extra_key)) is not None:
            ready = [one for one in ready if one.weight_version == version]
        if not ready:
            raise EngineGone(f"no engine of the pool may be asked: {self._faults()}")
        member = None if affinity is None else self._homes.get(affinity)
        if member not in ready:
            member = min(ready, key=lambda one: (one.running, one.chosen_at))
        assert member is not None
        member.chosen_at = next(self._order)
        if affinity is not None:
            self._homes[affinity] = member
            self._homes.move_to_end(affinity)
            if len(self._homes) > MOST_HOMES:
                self._homes.popitem(last=False)
        return member

    def _faults(self) -> str:
        return "; ".join(
            f"{one.url} holds version {one.weight_version}" if one.is_in else f"{one.url}: {one.fault}"
            for one in self._members
        )

    # -- the engines as one --------------------------------------------------------------------------------------------

    def ready(self) -> list[HttpEngine]:
        """Return the engines that get requests."""
        return [member.engine for member in self._members if member.is_in]

    async def is_healthy(self) -> bool:
        return any(member.is_in for member in self._members)

    async def fault(self) -> str | None:
        """Look at each engine that is out. Return the reason that none serves; None: at least one does."""
        for member in self._members:
            if not member.is_in:
                await self._join(member)
        if await self.is_healthy():
            return None
        return "; ".join(member.fault for member in self._members)

    def strangers(self) -> list[str]:
        """Return one sentence for each engine that answers and serves another model than the first."""
        return [member.fault for member in self._members if member.fault.startswith(STRANGER)]

    async def model_info(self) -> ModelInfo:
        if self._model is None:
            raise EngineGone(await self.fault() or "no engine of the pool has answered yet")
        return self._model.model_copy(update={"weight_version": self._holds()})

    def _holds(self) -> str:
        """Return the weight version of all engines; of engines that differ, a name that is no version's."""
        if self.weights is not None:
            return str(self.weights.weight_version)
        # Without the folder of pushed weights no engine that comes back could be given them: they are pushed again.
        return "default" if all(member.weight_version == 0 for member in self.members) else "unknown"

    async def adapter_folders(self) -> dict[str, str]:
        return {name: str(folder) for name, folder in self._adapters.items()}

    async def load_adapter(self, name: str, folder: Path) -> None:
        async with self._changes:

            async def load(member: Member) -> None:
                try:
                    await member.load(name, folder)
                except EngineRefused as error:
                    if name not in self._adapters:
                        raise
                    member.leave(f"it refused {name}, which the others hold: {error}")

            try:
                await self._each(load)
            except EngineRefused:
                with suppress(EngineGone, EngineRefused):
                    await self._each(lambda member: member.unload(name))
                raise
            self._adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        async with self._changes:
            self._adapters.pop(name, None)
            await self._each(lambda member: member.unload(name))

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        self._is_paused = True
        await self._each(lambda member: member.engine.pause(mode))

    async def resume(self) -> None:
        self._is_paused = False
        await self._each(lambda member: member.engine.resume())

    async def abort_all(self) -> None:
        for member in self._members:
            if not member.is_in:  # a reply that runs on there is aborted by nobody else
                member.engine.break_off()
        await self._each(lambda member: member.engine.abort_all())

    async def flush_cache(self) -> None:
        await self._each(lambda member: member.engine.flush_cache())

    async def update_weights(self, folder: Path, weight_version: int) -> None:
        async with self._changes:
            weights, took = Weights(folder, weight_version), list[Member]()

            async def push(member: Member) -> None:
                await member.push(weights)
                took.append(member)

            try:
                await self._each(push, within_s=None)
            except EngineRefused:
                for member in took:  # it comes back with the weights of the others
                    member.leave(f"it took version {weight_version}, which another engine refused")
                raise
            self.hold(weights)

    def hold_start(self, folder: Path) -> None:
        """Note the folder of the weights that the engines were started with, while all hold them."""
        if self.weights is None and self._holds() == "default":
            self.weights = Weights(folder, 0)

    def hold(self, weights: Weights) -> None:
        """Note the weights that an engine has to hold from now on, and place conversations anew: caches are empty."""
        self.weights = weights
        self._homes.clear()

    @asynccontextmanager
    async def rolling(self) -> AsyncIterator[None]:
        """Let engines differ meanwhile, and none come in."""
        async with self._changes:
            yield

    @property
    def every(self) -> tuple[Member, ...]:
        """All engines, in the order of their numbers."""
        return self._members

    @property
    def members(self) -> list[Member]:
        """The engines that get requests, for a swap that rolls."""
        return [member for member in self._members if member.is_in]

    async def _each(self, change: Callable[[Member], Awaitable[None]], within_s: float | None = -1) -> None:
        """Change every engine in the pool at once. One that fails leaves the pool.

        Raises EngineRefused of an engine, and EngineGone if none is left. within_s: -1 for the pool's `change_s`.
        """
        within_s = self._change_s if within_s == -1 else within_s
        found = await asyncio.gather(*(member.change(change(member), within_s) for member in self.members))
        if refusals := [one for one in found if one is not None]:
            raise refusals[0]
        if not self.ready():
            raise EngineGone(self._faults())

    # -- watch ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch every engine until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for member in self._members:
                tasks.create_task(self._watch(member), name=f"watch {member.url}")

    async def _watch(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        while True:
            member.left.clear()
            await (self._check(member) if member.is_in else self._join(member))
            if not member.is_in and not member.is_told and not member.left.is_set():
                member.is_told = True
                log.warning("engine_left_pool", engine=member.url, reason=member.fault)
            try:
                async with asyncio.timeout(self._poll_s):
                    await member.left.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(max(0.0, member.retry_at - loop.time()))

    async def _look(self, member: Member) -> str | None:
        """Return the engine's fault: one missed answer may be a pause, several are its end."""
        fault = await member.engine.fault()
        member.looked(fault)
        if fault is not None and member.missed >= DOWN_AFTER:
            member.leave(fault)
            if self.members:  # its replies go on elsewhere, where it closes no connection itself
                member.engine.break_off()
        return fault

    async def _check(self, member: Member) -> None:
        """Look at an engine of the pool, and take it out if it is gone or lacks what the others hold."""
        if await self._look(member) is not None or self._changes.locked():
            return
        adapters, weights = dict(self._adapters), self.weights
        try:
            async with asyncio.timeout(self._change_s):
                is_empty = await member.lacks(adapters, weights)
        except (EngineGone, EngineRefused, TimeoutError):
            return  # the next look, or the next call, finds it out
        if (
            is_empty
            and not member.is_aside
            and (adapters, weights) == (self._adapters, self.weights)
            and not self._changes.locked()
        ):
            member.leave(EMPTY)

    async def _join(self, member: Member) -> None:
        """Bring an engine that is out to the state of the others, and give it requests again."""
        fault = await self._look(member)
        if fault is not None or self._is_paused or member.is_aside or member.is_drained:
            member.fault = DRAINED if member.is_drained else fault or "a swap of weights runs"
            return
        try:
            async with asyncio.timeout(self._change_s):
                info = await member.engine.model_info()
            self._model = self._model or info
            if (stranger := stranger_of(info, self._model, member.url)) is not None:
                member.fault = stranger
                return
            async with self._changes:  # no adapter comes or leaves until it is in
                if self._is_paused or member.is_drained:
                    return
                # Full weights take longer; the engine's client bounds that call.
                async with asyncio.timeout(None if self.weights else self._change_s):
                    await member.take(dict(self._adapters), self.weights)
                member.come_in()
        except TimeoutError:
            member.fault = f"{member.url} did not answer within {self._change_s:g} s"
        except (EngineGone, EngineRefused) as error:
            member.fault = f"{member.url}: {error}"
        if member.is_in and member.is_told:
            member.is_told = False
            log.info("engine_joined_pool", engine=member.url, adapters=sorted(self._adapters))

    # -- operators -----------------------------------------------------------------------------------------------------

    def statuses(self) -> list[EngineStatus]:
        homes = Counter(self._homes.values())
        return [member.status(homes[member]) for member in self._members]

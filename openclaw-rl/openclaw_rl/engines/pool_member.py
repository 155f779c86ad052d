"""One engine of a pool: its state, and its way into the pool."""

import asyncio
import time
from collections.abc import Awaitable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from openclaw_rl.backoff import Backoff
from openclaw_rl.engines.admission import is_unknown_adapter
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.dialect import ModelInfo
from openclaw_rl.engines.put_adapter import put_adapter
from openclaw_rl.errors import EngineFaulty, EngineGone, EngineRefused
from openclaw_rl.telemetry.health import OUT_AFTER

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 10.0
"""Pauses before an engine whose calls fail may come back: longer with each failure that no reply came after."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine of the pool, for operators."""

    name: str
    """Its URL, or `engine 2` for one that the server starts: the name stays when its process starts again."""
    engine: str
    """Its URL now."""
    is_in: bool
    """False: it gets no request."""
    is_drained: bool
    """The operator took it out."""
    running: int
    """Calls on it now."""
    sessions: int
    """Conversations whose next request goes to it."""
    calls: int
    failures: int
    """Failed calls since the start."""
    fault: str | None
    """Its problem; None: it has none."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Full weights that every engine of the pool has to hold."""

    folder: Path | None
    """None: they are on no disk, and only their trainer can send them."""
    weight_version: int


def held(info: ModelInfo) -> int | None:
    """Return the version of the weights that an engine says it holds; 0 for those of its start."""
    named = info.weight_version or "default"
    if named == "default":
        return 0
    return int(named) if named.isascii() and named.isdigit() else None


STRANGER = "another model: "
"""Begin of a fault that only another start of that engine mends."""


def stranger_of(info: ModelInfo, first: ModelInfo, url: str) -> str | None:
    """Return the difference if an engine serves another model than the first one; None: it does not."""
    # Full weights that were pushed change the path that SGLang names, and end the hash that the embedded engine names.
    is_same = info.context_length == first.context_length
    if info.base_hash is not None and first.base_hash is not None:
        is_same = is_same and info.base_hash == first.base_hash
    elif held(info) == held(first) == 0:
        is_same = is_same and info.model_path == first.model_path
    if is_same:
        return None
    said = [f"{one.model_path} ({one.context_length} tokens, {one.base_hash or 'no hash'})" for one in (info, first)]
    return f"{STRANGER}{url} serves {said[0]}, and the first engine {said[1]}"


@dataclass(slots=True, eq=False)
class Member:
    """State of one engine. It belongs to the event loop."""

    engine: HttpEngine
    own_name: str | None = None
    """Name of an engine whose URL changes; None: its URL is its name."""
    is_in: bool = False
    is_drained: bool = False
    """The operator took it out, and it comes in only when told to (`pool_drains`)."""
    is_told: bool = False
    """The log has its absence."""
    fault: str = "it was not asked yet"
    failed_in_row: int = 0
    """Times that it left after a failed call, with no reply in between."""
    missed: int = 0
    """Polls without an answer, in a row."""
    answers: bool = False
    """The newest look got an answer, and it has not left since."""
    has_answered: bool = False
    """A look got an answer since the server's start."""
    answers_since: float = 0.0
    """Monotonic time of the first of the answers in a row."""
    running: int = 0
    calls: int = 0
    failures: int = 0
    chosen_at: int = 0
    """Place of its last choice in the order of all choices."""
    retry_at: float = 0.0
    """Loop time before which it is not asked again."""
    is_aside: bool = False
    """It is taking other weights, and gets no request meanwhile."""
    weight_version: int | None = None
    """Version of its own weights; None: it names none of ours."""
    joins: int = 0
    """Times that it came into the pool."""
    starts: int = 0
    """Times that it came back without the weights that it had taken: its process is another one."""
    is_unsure: bool = False
    """A push to it got no answer: it may take those weights later, whatever version it names now."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    took: dict[str, Path] = field(default_factory=dict)
    """Adapters that it took from us, with their folders."""
    _pauses: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S))

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def name(self) -> str:
        return self.own_name or self.url

    def looked(self, fault: str | None) -> None:
        """Note the result of a look; None: it answered."""
        if fault is None:
            self.answers_since = self.answers_since if self.answers else time.monotonic()
            self.missed, self.answers, self.has_answered = 0, True, True
        else:
            self.missed, self.answers = self.missed + 1, False

    def come_in(self) -> None:
        self.is_in, self.missed, self.joins = True, 0, self.joins + 1

    def leave(self, fault: str) -> None:
        """Take no more requests until a look has found the engine in order."""
        self.fault, self.answers = fault, False
        if self.is_in:
            self.is_in = False
            self.left.set()

    def failed(self, fault: str) -> None:
        """Leave after a call that failed."""
        self.failures += 1
        if self.is_in:  # calls that failed together count once
            self.failed_in_row += 1
            self.retry_at = asyncio.get_running_loop().time() + self._pauses.next_s()
        self.leave(fault)

    async def change(self, change: Awaitable[None], within_s: float | None) -> EngineRefused | None:
        """Return the refusal of a change. Leave if the engine fails it."""
        try:
            async with asyncio.timeout(within_s):
                await change
        except TimeoutError:
            self.failed(f"it did not answer within {within_s:g} s")
        except EngineGone as error:
            self.failed(str(error))
        except EngineRefused as error:
            return error
        return None

    def worked(self) -> None:
        if self.failed_in_row:
            self.failed_in_row = 0
            self._pauses.reset()

    @contextmanager
    def call(self) -> Iterator[int]:
        """Count a call while it runs. Yields `joins`: a failure tells nothing of an engine that has come back since."""
        self.running += 1
        self.calls += 1
        try:
            yield self.joins
        finally:
            self.running -= 1

    def status(self, sessions: int) -> EngineStatus:
        return EngineStatus(
            name=self.name,
            engine=self.url,
            is_in=self.is_in,
            is_drained=self.is_drained,
            running=self.running,
            sessions=sessions,
            calls=self.calls,
            failures=self.failures,
            fault=self._problem(),
        )

    def _problem(self) -> str | None:
        if self.is_drained:
            return None
        if self.is_told and not self.is_in:
            return f"out of the pool: {self.fault}"
        if self.failed_in_row >= OUT_AFTER:
            return f"failed {self.failed_in_row} times in a row, last: {self.fault}"
        return None

    async def load(self, name: str, folder: Path) -> None:
        await put_adapter(self.engine, name, folder, self.took)
        self.took[name] = folder

    async def unload(self, name: str) -> None:
        """Unload the adapter. An engine that was restarted does not know it."""
        with suppress(EngineRefused):
            await self.engine.unload_adapter(name)
        self.took.pop(name, None)  # not before: without an answer it goes when the engine comes back

    async def push(self, weights: Weights) -> None:
        """Replace its weights. Until one push has an answer they are unknown. Raises EngineError."""
        if weights.folder is None:
            raise EngineGone(f"only the trainer has version {weights.weight_version}, which the others hold")
        was_unsure, self.is_unsure = self.is_unsure, True
        try:
            await self.engine.update_weights(weights.folder, weights.weight_version)
        except EngineRefused:
            self.is_unsure = was_unsure
            raise
        self.is_unsure, self.weight_version = False, weights.weight_version

    async def lacks(self, adapters: dict[str, Path], weights: Weights | None) -> bool:
        """Return True if the engine says that it has lost one of these adapters, or the weights."""
        if weights is not None:
            return held(await self.engine.model_info()) != weights.weight_version
        folders = await self.engine.adapter_folders() if adapters else None
        return folders is not None and not adapters.keys() <= folders.keys()

    async def take(self, adapters: dict[str, Path], weights: Weights | None) -> None:
        """Load what the other engines hold. Raises EngineError. A swap may have left it paused."""
        await self.engine.resume()
        before, self.weight_version = self.weight_version, held(await self.engine.model_info())
        self.starts += before is not None and before != self.weight_version
        # Without weights of ours chats are held, and `publishing.engine_weights` pushes some before it lets them go on.
        if weights is not None and (self.is_unsure or self.weight_version != weights.weight_version):
            if self.running:
                self.engine.break_off()
                raise EngineGone("its replies have to end before it takes other weights")
            await self.engine.abort_all()
            await self.engine.flush_cache()  # refused while a request is there: the next look tries again
            await self.push(weights)
        for name in self.took.keys() - adapters.keys():
            await self.unload(name)
        folders = await self.engine.adapter_folders()
        for name, folder in adapters.items():
            if folders is None or folders.get(name) != str(folder):
                await self.load(name, folder)


EMPTY = "it was started again, and lacks what the others hold"
DRAINED = "drained by the operator"


class Tried:
    """Engines that one request has met."""

    def __init__(self, lora_path: str | None) -> None:
        self._lora_path = lora_path
        self._faults: dict[Member, tuple[str, int] | None] = {}
        """Fault and joins of each engine that answered badly; None: of one that has left."""

    def __contains__(self, member: object) -> bool:
        return member in self._faults

    def worked(self, member: Member) -> None:
        """Note an answer. The engines that answered the same request badly are at fault."""
        member.worked()
        for one, bad in self._faults.items():
            if bad is not None and one.joins == bad[1]:
                one.failed(bad[0])

    def may_go_on(
        self,
        member: Member,
        joins: int,
        error: EngineGone | EngineRefused,
        adapters: Container[str],
        serve: Sequence[Member],
    ) -> bool:
        """Take an engine out of the pool that failed or lost its adapters. False: the request is at fault.

        joins: of the engine when the call began.
        """
        self._faults[member] = None
        is_older = member.joins != joins  # the engine has come back since, and was found in order
        if isinstance(error, EngineRefused):
            if self._lora_path is None or self._lora_path not in adapters:
                is_empty = False
            else:
                is_empty = is_unknown_adapter(error, self._lora_path)
            if is_empty and not is_older:
                member.leave(EMPTY)
            elif not is_empty:
                member.worked()
            return is_empty
        if isinstance(error, EngineFaulty):
            # One request may break each engine that it meets. The engine is at fault where another one answers it.
            self._faults[member] = (str(error), joins)
            return len(serve) > 1 and sum(fault is not None for fault in self._faults.values()) < 2
        if not is_older:
            member.failed(str(error))
        return True

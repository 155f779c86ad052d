"""Jobs: the requests inside the engine, the end of their replies, and the mailbox of the model thread.

The event loop makes a `Job` and reads it. From submission to `finish` only the model thread writes it. The model thread
appends tokens first and raises `visible` last, so a reader of `visible` tokens never sees an id without its log-prob. A
slow reader finds several tokens at once: the two threads share no queue, so no queue can overflow.
"""

import asyncio
import contextlib
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import Tokenizer

from openclaw_rl.engines.dialect import EngineSampling, FinishReason
from openclaw_rl.errors import EngineGone

if TYPE_CHECKING:
    from openclaw_rl.engines.embedded.kv_cache import CachedSequence, CacheKey
    from openclaw_rl.engines.embedded.runner import Adapter

T = TypeVar("T")

GREEDY_BELOW = 1e-5
"""Temperatures under this mean greedy, as in SGLang."""

TopLogProbs = list[tuple[float, int]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The log-probs a request asked for."""

    output: bool = False
    prompt_from: int | None = None
    """First prompt token with an entry; None: no prompt log-probs."""
    top: int = 0
    ids: tuple[int, ...] = ()
    """Ids whose log-probs each prompt token's entry holds too."""


@dataclass(slots=True, eq=False)
class Job:
    """One request, and its reply so far."""

    rid: str
    prompt: list[int]
    sampling: EngineSampling
    max_new_tokens: int
    """The smaller of the request's limit and the room in the context."""
    wanted: Wanted
    key: "CacheKey"
    adapter: "Adapter | None"
    priority: int
    end_ids: frozenset[int]
    """Tokens that end the reply."""
    stops: "TokenStops | None" = None
    number: int = 0
    """Order of arrival, which the scheduler gives."""

    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[float | None] = field(default_factory=list)
    """Entry j belongs to token `wanted.prompt_from + j`; the first is None."""
    prompt_top_log_probs: list[TopLogProbs | None] = field(default_factory=list)
    prompt_id_log_probs: list[list[float] | None] = field(default_factory=list)
    """Log-probs of `wanted.ids` in their order."""
    cached_tokens: int | None = None
    finish: FinishReason | None = None
    visible: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    sequence: "CachedSequence | None" = None
    """The job's place in the KV cache; None while it waits."""
    seed: int = 0

    def __post_init__(self) -> None:
        asked = self.sampling.sampling_seed
        self.seed = secrets.randbits(63) if asked is None else asked

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW

    @property
    def temperature(self) -> float:
        """The divisor of the logits; a greedy reply reports temperature 1."""
        return 1.0 if self.is_greedy else self.sampling.temperature

    @property
    def tokens(self) -> list[int]:
        """The ids that the next token depends on."""
        return self.prompt + self.output

    @property
    def is_prefilled(self) -> bool:
        """Only the last sampled token is missing from the cache."""
        return self.sequence is not None and bool(self.output) and self.missing == 1

    @property
    def missing(self) -> int:
        """Number of tokens that are not in the cache yet."""
        held = len(self.sequence.tokens) if self.sequence else 0
        return len(self.prompt) + len(self.output) - held

    def publish(self) -> None:
        """Show the whole reply so far to the event loop."""
        self.visible = len(self.output)


class TokenStops:
    """Search for stop strings in a growing reply. A stop string may begin in one token and end in another."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decode = decode
        self._longest = max(map(len, self._stops), default=0)
        self._tail = ""
        self._begin, self._read = 0, 0
        # ids[begin:read] are decoded again with the ids behind them: the text of a token depends on the ids before it.

    def match(self, ids: Sequence[int]) -> str | None:
        """Return the stop string that the reply holds now, given all its ids so far."""
        known, text = self._decode(ids[self._begin : self._read]), self._decode(ids[self._begin :])
        if text.endswith("\ufffd"):
            return None  # in the middle of a character
        self._begin, self._read = self._read, len(ids)
        text = self._tail + text[len(known) :]
        self._tail = text[-self._longest :]
        return next((stop for stop in self._stops if stop in text), None)


def finish_after(job: "Job") -> FinishReason | None:
    """Return the reason if the reply ends with its last token: an end token, a stop string, or no room left."""
    # An end token counts before the limit: such a reply is complete.
    last = job.output[-1]
    if last in job.end_ids:
        return FinishReason(type="stop", matched=last)
    if job.stops is not None and (matched := job.stops.match(job.output)) is not None:
        return FinishReason(type="stop", matched=matched)
    if len(job.output) >= job.max_new_tokens:
        return FinishReason(type="length", length=len(job.output))
    return None


def load_decode(folder: Path) -> Decode | None:
    """Return the tokenizer's decode without special tokens; None when the folder holds no tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


class Mailbox:
    """Functions that the event loop wants the model thread to run between two steps.

    The HTTP requests in flight bound it: each of them has one or two functions in it at a time.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[Any] | None]] = queue.SimpleQueue()
        self._is_closed = threading.Event()

    async def call(self, function: Callable[[], T]) -> T:
        """Return or raise the result of `function` on the model thread. Raises EngineGone when the thread has ended."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._put(run, future)
        return await asyncio.wrap_future(future)

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` on the model thread and return at once."""
        self._put(function, None)

    def read(self, *, wait: bool) -> None:
        """Run the functions that are there, on the model thread; with `wait`, at least one."""
        with contextlib.suppress(queue.Empty):
            function, _ = self._queue.get(block=wait)
            function()
            while True:
                function, _ = self._queue.get_nowait()
                function()

    def close(self) -> None:
        """Refuse present and later callers, because the thread ends."""
        self._is_closed.set()
        self._refuse()

    def _put(self, function: Callable[[], None], future: "Future[Any] | None") -> None:
        self._queue.put((function, future))
        if self._is_closed.is_set():
            self._refuse()

    def _refuse(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                _, future = self._queue.get_nowait()
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(EngineGone("the model thread has ended"))

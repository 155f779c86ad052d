"""One request inside the engine: what was asked, and what has come of it so far.

The event loop makes a job and reads it; from submission to `finish` only the model thread writes it. The two meet in
`visible`, `finish` and `changed`: the model thread appends tokens first and raises `visible` last, so a reader that
takes `visible` tokens never sees an id without its log-prob. A slow reader finds several tokens at once; nothing is
queued, so nothing can overflow.

When a reply is over: an end token, a stop string, or no room left.

How the event loop talks to the model thread: functions that the thread runs between two steps.
"""

import asyncio
import contextlib
import queue
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from openclaw_rl.engines.dialect import EngineSampling, FinishReason
from openclaw_rl.errors import EngineGone

if TYPE_CHECKING:
    from openclaw_rl.engines.embedded.kv_cache import CacheKey
    from openclaw_rl.engines.embedded.kv_cache import Sequence as KvSequence
    from openclaw_rl.engines.embedded.runner import Adapter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

T = TypeVar("T")


class Mailbox:
    """Bounded by the HTTP requests in flight: each has one or two functions in it at a time."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[Any] | None]] = queue.SimpleQueue()
        self._is_closed = threading.Event()

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` gave or raised on the model thread. Raises EngineGone when the thread has ended."""
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
        """Like `call`, without an answer."""
        self._put(function, None)

    def read(self, *, wait: bool) -> None:
        """On the model thread: run what is there; with `wait`, at least one."""
        with contextlib.suppress(queue.Empty):
            function, _ = self._queue.get(block=wait)
            function()
            while True:
                function, _ = self._queue.get_nowait()
                function()

    def close(self) -> None:
        """The thread ends: callers are told, now and later."""
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


GREEDY_BELOW = 1e-5
"""Temperatures under this mean greedy, as in SGLang."""

TopLogProbs = list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The log-probs a request asked for."""

    output: bool = False
    prompt_from: int | None = None
    """First prompt token with an entry; None: no prompt log-probs."""
    top: int = 0


@dataclass(slots=True, eq=False)
class Job:
    rid: str
    prompt: list[int]
    sampling: EngineSampling
    max_new_tokens: int
    """What the context leaves of the request's own limit."""
    wanted: Wanted
    key: "CacheKey"
    adapter: "Adapter | None"
    priority: int
    end_ids: frozenset[int]
    """Tokens that end the reply."""
    stops: "TokenStops | None" = None
    number: int = 0
    """Order of arrival; given by the scheduler."""

    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    prompt_log_probs: list[float | None] = field(default_factory=list)
    """Entry j belongs to token `wanted.prompt_from + j`; the first is None."""
    prompt_top_log_probs: list[TopLogProbs | None] = field(default_factory=list)
    cached_tokens: int | None = None
    finish: FinishReason | None = None
    visible: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    sequence: "KvSequence | None" = None
    """Its place in the KV cache; None while it waits."""
    seed: int = 0

    def __post_init__(self) -> None:
        asked = self.sampling.sampling_seed
        self.seed = secrets.randbits(63) if asked is None else asked

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW

    @property
    def temperature(self) -> float:
        """What logits are divided by; a greedy reply reports temperature 1."""
        return 1.0 if self.is_greedy else self.sampling.temperature

    @property
    def tokens(self) -> list[int]:
        """Everything the next token depends on."""
        return self.prompt + self.output

    @property
    def is_prefilled(self) -> bool:
        """Only the last sampled token is missing in the cache."""
        return self.sequence is not None and bool(self.output) and self.missing == 1

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache yet."""
        held = len(self.sequence.tokens) if self.sequence else 0
        return len(self.prompt) + len(self.output) - held

    def publish(self) -> None:
        self.visible = len(self.output)


Decode = Callable[[Sequence[int]], str]


class TokenStops:
    """Finds stop strings in a growing reply; they may begin in one token and end in another."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decode = decode
        self._longest = max(map(len, self._stops), default=0)
        self._tail = ""
        self._begin, self._read = 0, 0
        """ids[begin:read] are in the text already, and are decoded again with what follows: a piece's text depends on
        its left.
        """

    def match(self, ids: Sequence[int]) -> str | None:
        """The stop string that the reply holds now, given all its ids so far."""
        known, text = self._decode(ids[self._begin : self._read]), self._decode(ids[self._begin :])
        if text.endswith("\ufffd"):
            return None  # in the middle of a character
        self._begin, self._read = self._read, len(ids)
        text = self._tail + text[len(known) :]
        self._tail = text[-self._longest :]
        return next((stop for stop in self._stops if stop in text), None)


def finish_after(job: "Job") -> FinishReason | None:
    """Whether the reply ends with its last token. An end token counts before the limit: such a reply is complete."""
    last = job.output[-1]
    if last in job.end_ids:
        return FinishReason(type="stop", matched=last)
    if job.stops is not None and (matched := job.stops.match(job.output)) is not None:
        return FinishReason(type="stop", matched=matched)
    if len(job.output) >= job.max_new_tokens:
        return FinishReason(type="length", length=len(job.output))
    return None


def load_decode(folder: Path) -> Decode | None:
    """The tokenizer's decode, special tokens left out; None when the folder holds no tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)

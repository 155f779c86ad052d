"""One request inside the engine: what was asked, and what has come of it so far.

The event loop makes a job and reads it; from submission to `finish` only the model thread writes it. The two meet in
`visible`, `finish` and `changed`: the model thread appends tokens first and raises `visible` last, so a reader that
takes `visible` tokens never sees an id without its log-prob. A slow reader finds several tokens at once; nothing is
queued, so nothing can overflow.
"""

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openclaw_rl.engines.dialect import EngineSampling, FinishReason

if TYPE_CHECKING:
    from openclaw_rl.engines.embedded.prefix_cache import CacheKey, Sequence
    from openclaw_rl.engines.embedded.runner import Adapter
    from openclaw_rl.engines.embedded.stopping import StopMatcher

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
    stops: "StopMatcher | None" = None
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

    sequence: "Sequence | None" = None
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

"""Protocol of the engine that the server calls. `client.HttpEngine` and `testing.FakeEngine` implement it.

Every call has a deadline. It raises `EngineRefused` (a 4xx: the request is at fault) or `EngineGone` (retry it).
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from openclaw_rl.engines.dialect import GenerateReply, GenerateRequest, ModelInfo
from openclaw_rl.types import Ids, LogProbs

PRIORITY_CHAT, PRIORITY_EPISODE, PRIORITY_BACKGROUND = 10, 5, 0
"""People wait for a chat, a runner of many agents for an episode's, and nobody for the rest."""

Tap = Callable[[GenerateReply], bool]
"""Reader of an event in the moment in which it arrives. It returns False for an event that it leaves to the iterator.

An iterator costs each token a turn of the event loop, and a generator for each layer above the engine."""


@dataclass(frozen=True, slots=True)
class Score:
    """Forced log-probs of T response tokens after a prompt, at temperature 1."""

    log_probs: LogProbs  # [T]
    top_log_probs: tuple[tuple[float, ...], ...] | None = None  # [T, K]
    top_ids: tuple[Ids, ...] | None = None  # [T, K]


class Engine(Protocol):
    def stream(self, request: GenerateRequest, tap: Tap | None = None) -> AsyncGenerator[GenerateReply, None]:
        """Yield the events as they arrive. Closing the iterator aborts the request on the engine.

        tap: gets events while the caller waits for the next one, in their order; never the first event or the last.
        """
        ...

    async def generate(self, request: GenerateRequest) -> GenerateReply: ...

    async def score(
        self, prompt_ids: Ids, response_ids: Ids, *, lora_path: str | None, extra_key: str | None, top_k: int = 0
    ) -> Score: ...

    async def score_ids(
        self, prompt_ids: Ids, response_ids: Ids, ids: Sequence[Ids], *, lora_path: str | None, extra_key: str | None
    ) -> Score:
        """Return `score`, whose table holds the given ids [T, K] in place of the likeliest."""
        ...

    async def is_healthy(self) -> bool: ...

    async def model_info(self) -> ModelInfo: ...

    async def adapter_folders(self) -> Mapping[str, str] | None:
        """Return the folder of each loaded adapter, by name; None if the engine does not tell."""
        ...

    async def load_adapter(self, name: str, folder: Path) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None: ...

    async def resume(self) -> None: ...

    async def abort_all(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def update_weights(self, folder: Path, weight_version: int) -> None: ...

"""What the scheduler asks of a model: run the new tokens of several sequences in one ragged pass, and hold their KV.

`llama_runner` is the fast implementation, `transformers_runner` the one for every architecture transformers has. A
runner is used by one thread and knows nothing of requests, sampling or caching policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


class KV(Protocol):
    """Keys and values of one sequence."""

    length: int
    """Tokens held."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded LoRA adapter; the runner that loaded it knows what `weights` is. Equal only to itself: names may come
    again.
    """

    name: str
    weights: object


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence. After `run` they are in `kv`."""

    kv: KV
    ids: Sequence[int]
    adapter: Adapter | None
    keep: int
    """Logits are wanted after each of the last `keep` tokens."""


class Logits(Protocol):
    """fp32 logits after the last `keep` tokens of a span; computed when asked for, since a row is as wide as the
    vocabulary.
    """

    def __len__(self) -> int: ...

    def rows(self, begin: int, end: int) -> Tensor:
        """[end - begin, V]"""
        ...


class Runner(Protocol):
    vocab_size: int
    context_length: int
    can_share: bool
    """Whether a prefix of a KV can be copied or kept; else every sequence starts empty."""

    def new_kv(self) -> KV: ...

    def copy_kv(self, kv: KV, length: int) -> KV:
        """A new KV that holds the first `length` tokens of `kv`."""
        ...

    def truncate_kv(self, kv: KV, length: int) -> None: ...

    def run(self, spans: Sequence[Span]) -> Sequence[Logits]:
        """Aligned with `spans`."""
        ...

    def last(self, logits: Sequence[Logits]) -> Tensor:
        """[N, V]: the logits after the last token of each, computed together."""
        ...

    def load_adapter(self, name: str, folder: Path) -> Adapter:
        """Raises EngineRefused when the folder holds no adapter of this base. Called from any thread."""
        ...

    def drop_adapter(self, adapter: Adapter) -> None: ...

    def load_weights(self, folder: Path) -> None:
        """Replace the base's tensors. Raises EngineRefused, and keeps the old ones, when they do not fit."""
        ...

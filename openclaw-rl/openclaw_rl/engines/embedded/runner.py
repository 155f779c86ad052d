"""Protocol of a model under the scheduler: run new tokens of several sequences in one ragged pass, and hold their KV.

`llama_runner` is the fast implementation, `transformers_runner` the one for every architecture of transformers. One
thread uses a runner. A runner does not know requests, sampling or the policy of the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


class KV(Protocol):
    """Keys and values of one sequence."""

    length: int
    """Number of tokens held."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded LoRA adapter, equal only to itself: a name may be loaded again."""

    name: str
    weights: object
    """A value that only the runner which loaded the adapter can read."""


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence. `run` adds them to `kv`."""

    kv: KV
    ids: Sequence[int]
    adapter: Adapter | None
    keep: int
    """Number of last tokens after which logits are needed."""


class Logits(Protocol):
    """fp32 logits after the last `keep` tokens of a span, computed when read: a row is as wide as the vocabulary."""

    def __len__(self) -> int: ...

    def rows(self, begin: int, end: int) -> Tensor:
        """Return [end - begin, V]."""
        ...


class Runner(Protocol):
    vocab_size: int
    context_length: int
    can_share: bool
    """A prefix of a KV can be copied or kept. Otherwise every sequence starts empty."""

    def new_kv(self) -> KV: ...

    def copy_kv(self, kv: KV, length: int) -> KV:
        """Return a new KV that holds the first `length` tokens of `kv`."""
        ...

    def truncate_kv(self, kv: KV, length: int) -> None: ...

    def run(self, spans: Sequence[Span]) -> Sequence[Logits]:
        """Compute the spans; return their logits, aligned with `spans`."""
        ...

    def last(self, logits: Sequence[Logits]) -> Tensor:
        """Return [N, V]: the logits after the last token of each, computed together."""
        ...

    def load_adapter(self, name: str, folder: Path) -> Adapter:
        """Load a PEFT folder, from any thread. Raises EngineRefused if it holds no adapter of this base."""
        ...

    def drop_adapter(self, adapter: Adapter) -> None: ...

    def load_weights(self, folder: Path) -> None:
        """Replace the base's tensors. Raises EngineRefused, and keeps the old ones, if the new ones do not fit."""
        ...

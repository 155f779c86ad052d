"""KV cache of the model thread: prefixes kept between requests, and the tensors of one sequence or of many.

* `PrefixCache` keeps sequences after their request, so that the next turn computes only its new tokens. A request
  continues the sequence with the longest common prefix under its key. `PrefixCache` takes that sequence over when it is
  idle and would lose at most `spare` tokens. Otherwise it copies the common part, also from a running sequence. It
  forgets the least recently used idle sequences over the token budget. Keys (`extra_key`, adapter) never share.
* `BlockKV` holds the keys and values of one sequence in one block that grows.
* `DecodeBatch` holds sequences that decode together, side by side in one tensor: a few products then compute the
  attention of all of them. A sequence takes a seat when it starts to decode beside others. It leaves the seat, copied
  out if it still has an owner, when it no longer does. While it is seated, its `BlockKV` is a view of the tensor, and
  readers see no difference. The seats in use are always the first ones. The tensor is as long as the longest sequence
  that it may hold; a page that was never written takes no memory.
"""

import math
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from openclaw_rl.engines.embedded.runner import KV, Adapter, Runner

_COMPARED = 256
"""Ids that `common_prefix` compares in one operation."""
_STEP = 256
"""Step of a block's capacity, in tokens."""
_MOST_BYTES = 1 << 29
"""Size limit of the seats' tensor."""
_MOST_TOKENS = 1024
"""Length limit of a seated sequence: for longer ones the arithmetic takes the time, not the number of calls."""
_ALIKE = 64
"""Tokens by which a seated sequence may exceed twice the median: all seats are computed as long as the longest."""


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Sequences under different keys never share a prefix."""

    extra_key: str | None
    adapter: Adapter | None
    """Compared by identity: another load of the same name is another adapter."""


@dataclass(slots=True, eq=False)
class CachedSequence:
    """Tokens with their keys and values: busy with one request, or idle until a request continues it."""

    key: CacheKey
    kv: KV
    tokens: list[int] = field(default_factory=list)
    """The ids whose keys and values `kv` holds."""
    is_busy: bool = True
    last_used: int = 0


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of equal leading tokens."""
    end, at = min(len(a), len(b)), 0
    while at < end and a[at : at + _COMPARED] == b[at : at + _COMPARED]:
        at += _COMPARED
    while at < end and a[at] == b[at]:
        at += 1
    return min(at, end)


class PrefixCache:
    """Sequences by key, within a budget of idle tokens."""

    def __init__(self, runner: Runner, *, budget: int, spare: int) -> None:
        self._runner, self._budget, self._spare = runner, budget, spare
        self._held: dict[CacheKey, list[CachedSequence]] = {}
        self._clock = 0

    def known(self, key: CacheKey, tokens: list[int], limit: int) -> int:
        """Return how many of the first `limit` tokens `take` would find."""
        return self._longest(key, tokens, limit)[1]

    def take(self, key: CacheKey, tokens: list[int], limit: int) -> CachedSequence:
        """Return a busy sequence that holds as many of the first `limit` tokens as the cache knows."""
        best, matched = self._longest(key, tokens, limit)
        if best is None or matched == 0:
            found = CachedSequence(key, self._runner.new_kv())
            self._held.setdefault(key, []).append(found)
        elif not best.is_busy and len(best.tokens) - matched <= self._spare:
            self._runner.truncate_kv(best.kv, matched)
            del best.tokens[matched:]
            found = best
        else:
            found = CachedSequence(key, self._runner.copy_kv(best.kv, matched), tokens[:matched])
            self._held[key].append(found)
            best.last_used = self._tick()
        found.is_busy = True
        found.last_used = self._tick()
        return found

    def give_back(self, sequence: CachedSequence, *, keep: bool = True) -> None:
        """Keep the sequence, which runs no longer, for a later request, or forget it."""
        sequence.is_busy = False
        sequence.last_used = self._tick()
        if not keep or not self._runner.can_share or not sequence.tokens:
            self._forget(sequence)
        self._evict()

    def clear(self, *, adapter: Adapter | None = None) -> None:
        """Forget the idle sequences: all of them, or those of one adapter."""
        for held in list(self._held.values()):
            for sequence in list(held):
                if not sequence.is_busy and (adapter is None or sequence.key.adapter is adapter):
                    self._forget(sequence)

    def _longest(self, key: CacheKey, tokens: list[int], limit: int) -> tuple[CachedSequence | None, int]:
        if not self._runner.can_share:
            return None, 0
        best: CachedSequence | None = None
        best_rank = (0, False)
        for sequence in self._held.get(key, ()):
            matched = min(common_prefix(sequence.tokens, tokens), limit)
            can_take = not sequence.is_busy and len(sequence.tokens) - matched <= self._spare
            if (matched, can_take) > best_rank:
                best, best_rank = sequence, (matched, can_take)
        return best, best_rank[0]

    def _forget(self, sequence: CachedSequence) -> None:
        held = self._held[sequence.key]
        held.remove(sequence)
        if not held:
            del self._held[sequence.key]

    def _evict(self) -> None:
        idle = [s for held in self._held.values() for s in held if not s.is_busy]
        total = sum(len(s.tokens) for s in idle)
        for sequence in sorted(idle, key=lambda s: s.last_used):
            if total <= self._budget:
                return
            total -= len(sequence.tokens)
            self._forget(sequence)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


class BlockKV:
    """Keys and values of one sequence, [layers, kv_heads, capacity, head_dim] each; `length` tokens are written."""

    __slots__ = ("__weakref__", "keys", "length", "values")

    def __init__(self, keys: Tensor, values: Tensor, length: int = 0) -> None:
        self.keys, self.values, self.length = keys, values, length

    @classmethod
    def empty(cls, layers: int, kv_heads: int, head_dim: int, device: torch.device) -> Self:
        empty = torch.empty(layers, kv_heads, 0, head_dim, device=device)
        return cls(empty, empty)

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens."""
        layers, heads, capacity, width = self.keys.shape
        if length <= capacity:
            return
        wanted = max(length, capacity + capacity // 8)  # a block that grows is copied: by an eighth at least
        wanted += -wanted % _STEP
        self.move(*(old.new_empty(layers, heads, wanted, width) for old in (self.keys, self.values)))

    def move(self, keys: Tensor, values: Tensor) -> None:
        """Copy the keys and values into other tensors, which have room for them, and use those from now on."""
        keys[:, :, : self.length] = self.keys[:, :, : self.length]
        values[:, :, : self.length] = self.values[:, :, : self.length]
        self.keys, self.values = keys, values

    def copy(self, length: int) -> "BlockKV":
        """Return a block with the first `length` tokens and room for more."""
        empty = self.keys[:, :, :0]
        copied = BlockKV(empty, empty)
        copied.reserve(length + 1)
        copied.keys[:, :, :length] = self.keys[:, :, :length]
        copied.values[:, :, :length] = self.values[:, :, :length]
        copied.length = length
        return copied


class DecodeBatch:
    """Seats for `count` sequences in one tensor."""

    def __init__(self, count: int, *, layers: int, kv_heads: int, head_dim: int) -> None:
        token_bytes = 8 * layers * kv_heads * head_dim
        self.capacity = min(_MOST_TOKENS, _MOST_BYTES // (token_bytes * count)) if count else 0
        self.blocks = _zeros(layers, 2, count, kv_heads, self.capacity, head_dim)
        """Keys at [:, 0], values at [:, 1]."""
        self._count = count
        self._taken: list[weakref.ref[BlockKV]] = []

    def seat(self, candidates: Sequence[BlockKV]) -> list[BlockKV]:
        """Seat those candidates that can decode together; return them in the order of their seats.

        The list is empty if fewer than two candidates can sit together.
        """
        wanted = self._alike(candidates)
        staying = {id(kv) for kv in wanted}
        held = [reference() for reference in self._taken]
        seated: list[BlockKV | None] = []
        for at, kv in enumerate(held):
            if kv is None or not self._is_in(kv, at):
                seated.append(None)
            elif id(kv) not in staying:
                _copy_out(kv)
                seated.append(None)
            else:
                seated.append(kv)
        present = {id(kv) for kv in seated if kv is not None}
        newcomers = [kv for kv in wanted if id(kv) not in present]
        for at in range(len(seated)):
            if seated[at] is None and newcomers:
                seated[at] = self._put(newcomers.pop(0), at)
        while None in seated:
            last = seated.pop()
            if last is not None:
                at = seated.index(None)
                seated[at] = self._put(last, at)
        for kv in newcomers:
            seated.append(self._put(kv, len(seated)))
        together = [kv for kv in seated if kv is not None]
        self._taken = [weakref.ref(kv) for kv in together]
        return together

    def _alike(self, candidates: Sequence[BlockKV]) -> list[BlockKV]:
        """Return the candidates that fit and are of similar length, the seated ones first."""
        fitting = [kv for kv in candidates if kv.length < self.capacity]
        if len(fitting) < 2:
            return []
        median = sorted(kv.length for kv in fitting)[len(fitting) // 2]
        alike = [kv for kv in fitting if kv.length <= 2 * median + _ALIKE]
        if len(alike) > self._count:
            sitting = {id(reference()) for reference in self._taken}
            alike = sorted(alike, key=lambda kv: id(kv) not in sitting)[: self._count]
        return alike if len(alike) > 1 else []

    def _is_in(self, kv: BlockKV, at: int) -> bool:
        # A sequence that outgrew its seat has moved into a block of its own.
        return kv.keys.data_ptr() == self.blocks[:, 0, at].data_ptr()

    def _put(self, kv: BlockKV, at: int) -> BlockKV:
        kv.move(self.blocks[:, 0, at], self.blocks[:, 1, at])
        return kv


def _zeros(*shape: int) -> Tensor:
    """Return zeros whose pages take no memory before they are written."""
    # Numbers beyond a sequence's end are multiplied by 0, so they must be finite.
    if not math.prod(shape):
        return torch.zeros(shape)
    return torch.frombuffer(mmap.mmap(-1, 4 * math.prod(shape), mmap.MAP_PRIVATE), dtype=torch.float32).view(shape)


def _copy_out(kv: BlockKV) -> None:
    own = kv.copy(kv.length)
    kv.keys, kv.values = own.keys, own.values

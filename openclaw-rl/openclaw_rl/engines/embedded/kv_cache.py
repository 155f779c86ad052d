"""Prefix KV cache: sequences kept after their request, so that the next turn computes only what is new.

A request continues the held sequence with the longest common prefix under its key. When that sequence is idle and would
lose at most `spare` tokens, it is taken over; else the common part is copied, also from a sequence that is running.
Idle sequences over the token budget are forgotten, least recently used first. Keys (`extra_key`, adapter) never share.
Used by the model thread alone.

Keys and values of one sequence, in one block that grows. While it decodes beside others it may lie in a seat
(`seats`) instead: then the block is a view, and nothing else changes for who reads it.

Sequences that decode together, side by side in one tensor: their attention is then a few products for all of them,
not a few for each.

A sequence takes a seat when it starts to decode beside others, and leaves it (copied out, if anybody still wants it)
when it no longer does; the seats in use are always the first ones. The tensor is as long as the longest sequence it
may hold, but a page that was never written takes no memory.
"""

import math
import mmap
import weakref
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from openclaw_rl.engines.embedded.runner import KV, Adapter, Runner

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class CacheKey:
    extra_key: str | None
    adapter: Adapter | None
    """By identity: another load of the same name is another adapter."""


@dataclass(slots=True, eq=False)
class Sequence:
    key: CacheKey
    kv: KV
    tokens: list[int] = field(default_factory=list)
    """The ids whose keys and values `kv` holds."""
    is_busy: bool = True
    last_used: int = 0


def common_prefix(a: SequenceOf[int], b: SequenceOf[int]) -> int:
    """How many leading tokens are equal."""
    end, at = min(len(a), len(b)), 0
    while at < end and a[at : at + _BLOCK] == b[at : at + _BLOCK]:
        at += _BLOCK
    while at < end and a[at] == b[at]:
        at += 1
    return min(at, end)


class PrefixCache:
    def __init__(self, runner: Runner, *, budget: int, spare: int) -> None:
        self._runner, self._budget, self._spare = runner, budget, spare
        self._held: dict[CacheKey, list[Sequence]] = {}
        self._clock = 0

    @property
    def idle_tokens(self) -> int:
        return sum(len(s.tokens) for held in self._held.values() for s in held if not s.is_busy)

    def take(self, key: CacheKey, tokens: list[int], limit: int) -> Sequence:
        """A busy sequence that holds as many of the first `limit` tokens as the cache knows."""
        best, matched = self._longest(key, tokens, limit)
        if best is None or matched == 0:
            found = Sequence(key, self._runner.new_kv())
            self._held.setdefault(key, []).append(found)
        elif not best.is_busy and len(best.tokens) - matched <= self._spare:
            self._runner.truncate_kv(best.kv, matched)
            del best.tokens[matched:]
            found = best
        else:
            found = Sequence(key, self._runner.copy_kv(best.kv, matched), tokens[:matched])
            self._held[key].append(found)
            best.last_used = self._tick()
        found.is_busy = True
        found.last_used = self._tick()
        return found

    def give_back(self, sequence: Sequence, *, keep: bool = True) -> None:
        """The sequence runs no longer: keep it for a later request, or forget it."""
        sequence.is_busy = False
        sequence.last_used = self._tick()
        if not keep or not self._runner.can_share or not sequence.tokens:
            self._forget(sequence)
        self._evict()

    def clear(self, *, adapter: Adapter | None = None) -> None:
        """Forget what is idle: all of it, or one adapter's."""
        for held in list(self._held.values()):
            for sequence in list(held):
                if not sequence.is_busy and (adapter is None or sequence.key.adapter is adapter):
                    self._forget(sequence)

    def _longest(self, key: CacheKey, tokens: list[int], limit: int) -> tuple[Sequence | None, int]:
        if not self._runner.can_share:
            return None, 0
        best: Sequence | None = None
        best_rank = (0, False)
        for sequence in self._held.get(key, ()):
            matched = min(common_prefix(sequence.tokens, tokens), limit)
            can_take = not sequence.is_busy and len(sequence.tokens) - matched <= self._spare
            if (matched, can_take) > best_rank:
                best, best_rank = sequence, (matched, can_take)
        return best, best_rank[0]

    def _forget(self, sequence: Sequence) -> None:
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


_STEP = 256
"""Capacity comes in steps of so many tokens; a block that grows is copied, so it also grows by an eighth."""


class BlockKV:
    """[layers, kv_heads, capacity, head_dim] each; the first `length` tokens hold something."""

    __slots__ = ("__weakref__", "keys", "length", "values")

    def __init__(self, keys: Tensor, values: Tensor, length: int = 0) -> None:
        self.keys, self.values, self.length = keys, values, length

    @classmethod
    def empty(cls, layers: int, kv_heads: int, head_dim: int, device: torch.device) -> Self:
        nothing = torch.empty(layers, kv_heads, 0, head_dim, device=device)
        return cls(nothing, nothing)

    def reserve(self, length: int) -> None:
        layers, heads, capacity, width = self.keys.shape
        if length <= capacity:
            return
        wanted = max(length, capacity + capacity // 8)
        wanted += -wanted % _STEP
        self.move(*(old.new_empty(layers, heads, wanted, width) for old in (self.keys, self.values)))

    def move(self, keys: Tensor, values: Tensor) -> None:
        """Into other tensors, that have room for it."""
        keys[:, :, : self.length] = self.keys[:, :, : self.length]
        values[:, :, : self.length] = self.values[:, :, : self.length]
        self.keys, self.values = keys, values

    def copy(self, length: int) -> "BlockKV":
        """The first `length` tokens, with room for more."""
        nothing = self.keys[:, :, :0]
        copied = BlockKV(nothing, nothing)
        copied.reserve(length + 1)
        copied.keys[:, :, :length] = self.keys[:, :, :length]
        copied.values[:, :, :length] = self.values[:, :, :length]
        copied.length = length
        return copied


_MOST_BYTES = 1 << 29
_MOST_TOKENS = 1024
"""Longer texts go alone: for them the arithmetic, not the number of calls, takes the time."""
_ALIKE = 64
"""A text up to this much longer than twice the median sits with the others; all are computed as long as the longest."""


class DecodeBatch:
    def __init__(self, count: int, *, layers: int, kv_heads: int, head_dim: int) -> None:
        token_bytes = 8 * layers * kv_heads * head_dim
        self.capacity = min(_MOST_TOKENS, _MOST_BYTES // (token_bytes * count)) if count else 0
        self.blocks = _zeros(layers, 2, count, kv_heads, self.capacity, head_dim)
        """keys at [:, 0], values at [:, 1]"""
        self._count = count
        self._taken: list[weakref.ref[BlockKV]] = []

    def seat(self, candidates: SequenceOf[BlockKV]) -> list[BlockKV]:
        """Those of them that decode together now, in the order of their seats; none if fewer than two can."""
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

    def _alike(self, candidates: SequenceOf[BlockKV]) -> list[BlockKV]:
        """The ones that fit, and are of similar length; those who sit already first."""
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
        """It may have grown out of its seat."""
        return kv.keys.data_ptr() == self.blocks[:, 0, at].data_ptr()

    def _put(self, kv: BlockKV, at: int) -> BlockKV:
        kv.move(self.blocks[:, 0, at], self.blocks[:, 1, at])
        return kv


def _zeros(*shape: int) -> Tensor:
    """Zero without being written: what lies beyond a sequence's end is multiplied by 0, so it must be a number."""
    if not math.prod(shape):
        return torch.zeros(shape)
    return torch.frombuffer(mmap.mmap(-1, 4 * math.prod(shape), mmap.MAP_PRIVATE), dtype=torch.float32).view(shape)


def _copy_out(kv: BlockKV) -> None:
    own = kv.copy(kv.length)
    kv.keys, kv.values = own.keys, own.values

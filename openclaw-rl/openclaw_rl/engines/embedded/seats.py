"""Sequences that decode together, side by side in one tensor: their attention is then a few products for all of them,
not a few for each.

A sequence takes a seat when it starts to decode beside others, and leaves it (copied out, if anybody still wants it)
when it no longer does; the seats in use are always the first ones. The tensor is as long as the longest sequence it
may hold, but a page that was never written takes no memory.
"""

import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from openclaw_rl.engines.embedded.block_kv import BlockKV

_MOST_BYTES = 1 << 29
_MOST_TOKENS = 1024
"""Longer texts go alone: for them the arithmetic, not the number of calls, takes the time."""
_ALIKE = 64
"""A text up to this much longer than twice the median sits with the others; all are computed as long as the longest."""


class Seats:
    def __init__(self, count: int, *, layers: int, kv_heads: int, head_dim: int) -> None:
        token_bytes = 8 * layers * kv_heads * head_dim
        self.capacity = min(_MOST_TOKENS, _MOST_BYTES // (token_bytes * count)) if count else 0
        self.blocks = _zeros(layers, 2, count, kv_heads, self.capacity, head_dim)
        """keys at [:, 0], values at [:, 1]"""
        self._count = count
        self._taken: list[weakref.ref[BlockKV]] = []

    def seat(self, candidates: Sequence[BlockKV]) -> list[BlockKV]:
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

    def _alike(self, candidates: Sequence[BlockKV]) -> list[BlockKV]:
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

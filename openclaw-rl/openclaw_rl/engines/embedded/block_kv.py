"""Keys and values of one sequence, in one block that grows. While it decodes beside others it may lie in a seat
(`seats`) instead: then the block is a view, and nothing else changes for who reads it.
"""

from typing import Self

import torch
from torch import Tensor

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

"""Attention of one step: each span over its own sequence, after its new keys and values are written.

Sequences that decode one token and have seats (`DecodeBatch`) are computed together, padded to the longest; the others
one after the other. All views and indices are made once per step for all layers. A step has hundreds of small calls, so
slicing per layer would cost as much as some of the arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.embedded.kv_cache import BlockKV


@dataclass(frozen=True, slots=True)
class Rows:
    """A span's place among the tokens of the step."""

    begin: int
    end: int
    kv: BlockKV

    @property
    def count(self) -> int:
        return self.end - self.begin


class StepAttention:
    def __init__(
        self,
        spans: Sequence[Rows],
        blocks: Tensor,
        seated: Sequence[BlockKV],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
    ) -> None:
        """seated: the sequences with seats in `blocks`, in order. The caller has reserved room for the new tokens."""
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        seats = {id(kv): at for at, kv in enumerate(seated)}
        together = sorted((rows for rows in spans if id(rows.kv) in seats), key=lambda rows: seats[id(rows.kv)])
        self._table = _Table(together, blocks) if together else None
        self._places = [_Place(rows) for rows in spans if id(rows.kv) not in seats]

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Map qkv [N, heads + 2 kv_heads, head_dim], the first two parts rotated, to [N, heads * head_dim]."""
        if self._table is not None and self._table.is_whole_step(qkv.shape[0]):
            return self._table(layer, qkv, self._heads)
        if self._table is None and len(self._places) == 1:
            return self._span(layer, self._places[0], qkv)
        seen = qkv.new_empty(qkv.shape[0], self._heads * self._head_dim)
        if self._table is not None:
            seen[self._table.rows] = self._table(layer, qkv, self._heads)
        for place in self._places:
            seen[place.rows.begin : place.rows.end] = self._span(layer, place, qkv)
        return seen

    def _span(self, layer: int, place: "_Place", qkv: Tensor) -> Tensor:
        begin, end, count = place.rows.begin, place.rows.end, place.rows.count
        q, k, v = qkv[begin:end].split([self._heads, self._kv_heads, self._kv_heads], 1)
        if count == 1:  # The query heads that share a kv head stand as its rows: no head is repeated.
            place.new_keys[layer].copy_(k[0])
            place.new_values[layer].copy_(v[0])
            query = q.view(1, self._kv_heads, -1, self._head_dim)
            return F.scaled_dot_product_attention(query, place.keys[layer], place.values[layer]).reshape(1, -1)
        place.new_keys[layer].copy_(k)
        place.new_values[layer].copy_(v)
        seen = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            place.keys[layer],
            place.values[layer],
            attn_mask=place.mask,
            is_causal=place.mask is None,
            enable_gqa=self._heads != self._kv_heads,
        )
        return seen[0].transpose(0, 1).reshape(count, -1)


class _Table:
    """The seated sequences: one token each."""

    def __init__(self, seated: Sequence[Rows], blocks: Tensor) -> None:
        layers, _, count, kv_heads, capacity, head_dim = blocks.shape
        n, lengths = len(seated), [rows.kv.length for rows in seated]
        longest = max(lengths) + 1
        begins = [rows.begin for rows in seated]
        self.rows = torch.tensor(begins)
        self._in_order = begins == list(range(n))
        self._scale = head_dim**-0.5
        # One flat row of the layer for each new key and value of each head.
        seat, head = torch.arange(n)[:, None], torch.arange(kv_heads)[None]
        keys_at = (seat * kv_heads + head) * capacity + torch.tensor(lengths)[:, None]
        self._written = torch.cat((keys_at, keys_at + count * kv_heads * capacity), 1).flatten()
        self._flat = blocks.view(layers, -1, head_dim).unbind(0)
        used = blocks[:, :, :n].flatten(2, 3)[..., :longest, :]  # [layers, 2, n * kv_heads, longest, head_dim]
        self._keys: Sequence[Tensor] = used[:, 0].transpose(-1, -2).unbind(0)
        self._values: Sequence[Tensor] = used[:, 1].unbind(0)
        self._mask: Tensor | None = None
        if min(lengths) < longest - 1:
            beyond = torch.arange(longest)[None] > torch.tensor(lengths)[:, None]
            mask = torch.zeros(n, longest).masked_fill_(beyond, float("-inf"))
            self._mask = mask.repeat_interleave(kv_heads, 0)[:, None]  # [n * kv_heads, 1, longest]

    def is_whole_step(self, count: int) -> bool:
        """Return True if the step's `count` tokens are those of these sequences, in the order of their seats."""
        return self._in_order and count == self.rows.shape[0]

    def __call__(self, layer: int, qkv: Tensor, heads: int) -> Tensor:
        """Return [n, heads * head_dim], in the order of the seats."""
        if not self.is_whole_step(qkv.shape[0]):
            qkv = qkv.index_select(0, self.rows)
        n, _, head_dim = qkv.shape
        self._flat[layer].index_copy_(0, self._written, qkv[:, heads:].reshape(-1, head_dim))
        # The query heads that share a kv head stand as its rows: no head is repeated.
        q = torch.mul(qkv[:, :heads], self._scale).view(self._keys[layer].shape[0], -1, head_dim)
        scores = torch.bmm(q, self._keys[layer])  # [n * kv_heads, heads / kv_heads, longest]
        if self._mask is not None:
            scores.add_(self._mask)
        return torch.bmm(scores.softmax(-1), self._values[layer]).view(n, -1)


class _Place:
    """A span computed alone: its views, a list over layers each."""

    __slots__ = ("keys", "mask", "new_keys", "new_values", "rows", "values")

    def __init__(self, rows: Rows) -> None:
        kv, start, stop = rows.kv, rows.kv.length, rows.kv.length + rows.count
        self.rows = rows
        self.keys: Sequence[Tensor] = kv.keys[:, None, :, :stop].unbind(0)  # [1, kv_heads, stop, head_dim]
        self.values: Sequence[Tensor] = kv.values[:, None, :, :stop].unbind(0)
        if rows.count == 1:  # [kv_heads, head_dim]
            self.new_keys: Sequence[Tensor] = kv.keys[:, :, start].unbind(0)
            self.new_values: Sequence[Tensor] = kv.values[:, :, start].unbind(0)
        else:  # [count, kv_heads, head_dim]
            self.new_keys = kv.keys[:, :, start:stop].transpose(1, 2).unbind(0)
            self.new_values = kv.values[:, :, start:stop].transpose(1, 2).unbind(0)
        # One token attends to all, a whole prompt is plainly causal; several tokens after a prefix need a mask.
        self.mask: Tensor | None = None
        if rows.count > 1 and start > 0:
            blocked = torch.full((rows.count, stop), float("-inf"), device=kv.keys.device)
            self.mask = blocked.triu_(start + 1)

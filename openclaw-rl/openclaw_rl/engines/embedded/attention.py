"""Attention of one step: each span over its own sequence, whose keys and values it first extends.

All views into the sequences' blocks are cut once per step, for every layer at a time: with hundreds of small calls in a
step, slicing would cost as much as some of the arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.embedded.block_kv import BlockKV


@dataclass(frozen=True, slots=True)
class Rows:
    """A span's place among the tokens of the step."""

    begin: int
    end: int
    kv: BlockKV

    @property
    def count(self) -> int:
        return self.end - self.begin


class _Place:
    """One span's views, a list over layers each."""

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
        # One token sees everything, a whole prompt is plainly causal; several tokens after a prefix need a mask.
        self.mask: Tensor | None = None
        if rows.count > 1 and start > 0:
            blocked = torch.full((rows.count, stop), float("-inf"), device=kv.keys.device)
            self.mask = blocked.triu_(start + 1)


class StepAttention:
    def __init__(self, spans: Sequence[Rows], *, kv_heads: int) -> None:
        """Room for the new tokens must be reserved."""
        self._places = [_Place(rows) for rows in spans]
        self._kv_heads = kv_heads
        self._is_decode = all(rows.count == 1 for rows in spans)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, heads, head_dim], k and v [N, kv_heads, head_dim] → [N, heads * head_dim]."""
        if self._is_decode:
            seen = self._decode(layer, q, k, v)
        else:
            seen = [self._span(layer, place, q, k, v) for place in self._places]
        return seen[0] if len(seen) == 1 else torch.cat(seen)

    def _decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """One token each. The query heads that share a kv head stand as its rows: no head is repeated."""
        places = self._places
        torch._foreach_copy_([place.new_keys[layer] for place in places], k.unbind(0))
        torch._foreach_copy_([place.new_values[layer] for place in places], v.unbind(0))
        queries = q.view(q.shape[0], 1, self._kv_heads, -1, q.shape[-1]).unbind(0)
        return [
            F.scaled_dot_product_attention(query, place.keys[layer], place.values[layer]).reshape(1, -1)
            for query, place in zip(queries, places, strict=True)
        ]

    def _span(self, layer: int, place: _Place, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begin, end, count = place.rows.begin, place.rows.end, place.rows.count
        if count == 1:
            place.new_keys[layer].copy_(k[begin])
            place.new_values[layer].copy_(v[begin])
            query = q[begin].view(1, self._kv_heads, -1, q.shape[-1])
            return F.scaled_dot_product_attention(query, place.keys[layer], place.values[layer]).reshape(1, -1)
        place.new_keys[layer].copy_(k[begin:end])
        place.new_values[layer].copy_(v[begin:end])
        seen = F.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None],
            place.keys[layer],
            place.values[layer],
            attn_mask=place.mask,
            is_causal=place.mask is None,
            enable_gqa=q.shape[1] != self._kv_heads,
        )
        return seen[0].transpose(0, 1).reshape(count, -1)

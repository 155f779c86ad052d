"""The fast runner: our own forward of the Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3), in fp32.

All new tokens of a step run together through every linear layer, across sequences, lengths and adapters. Attention runs
sequence by sequence, or over the seated sequences together (`DecodeBatch`). Spans are ordered by adapter, so that the
rows of an adapter are one slice. Tests compare its log-probs with those of transformers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.embedded.adapters import LayerPairs, read_adapter
from openclaw_rl.engines.embedded.attention import Rows, StepAttention
from openclaw_rl.engines.embedded.kv_cache import BlockKV, DecodeBatch
from openclaw_rl.engines.embedded.linear import Linear
from openclaw_rl.engines.embedded.llama_model import (
    DOWN,
    GATE,
    OUT,
    QKV,
    UP,
    Layer,
    Shape,
    read_shape,
    read_weights,
    rope_frequencies,
)
from openclaw_rl.engines.embedded.runner import KV, Adapter, Logits, Span
from openclaw_rl.engines.embedded.throttle import ThreadChooser
from openclaw_rl.errors import EngineRefused


@dataclass(frozen=True, slots=True, eq=False)
class HiddenLogits:
    """Logits that the head computes from hidden states when they are read."""

    hidden: Tensor  # [keep, hidden], normed
    head: Linear

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def rows(self, begin: int, end: int) -> Tensor:
        return self.head(self.hidden[begin:end])


_Group = tuple[int, int, list[LayerPairs]]
"""Rows begin … end, which run under one adapter, and that adapter's pairs."""


class LlamaRunner:
    """`Runner` of the Llama family."""

    can_share = True

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        *,
        context_length: int,
        device: torch.device,
        threads: int = 1,
        seats: int = 0,
    ) -> None:
        """threads: limit of a step's CPU threads. seats: sequences whose attention may be computed together."""
        self._shape, self._device = shape, device
        self._threads = ThreadChooser(threads)
        self._seats = DecodeBatch(seats, layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        self._root_eps = torch.tensor(shape.eps**0.5, device=device)
        self._token_bytes = 8 * shape.layers * shape.kv_heads * shape.head_dim
        self._weights = read_weights(folder, shape, device)
        frequencies, self._rope_factor = rope_frequencies(folder, shape)
        self._frequencies = frequencies.to(device)
        self._weight_bytes = 4 * sum(size.numel() for layer in self._weights.layers for size in layer.shapes.values())
        self.vocab_size = self._shape.vocab_size
        self.context_length = context_length

    # -- KV ------------------------------------------------------------------------------------------------------------

    def new_kv(self) -> BlockKV:
        shape = self._shape
        return BlockKV.empty(shape.layers, shape.kv_heads, shape.head_dim, self._device)

    def copy_kv(self, kv: KV, length: int) -> BlockKV:
        assert isinstance(kv, BlockKV)
        return kv.copy(length)

    def truncate_kv(self, kv: KV, length: int) -> None:
        assert isinstance(kv, BlockKV)
        kv.length = length

    # -- forward -------------------------------------------------------------------------------------------------------

    def run(self, spans: Sequence[Span]) -> list[Logits]:
        rows = sum(len(span.ids) for span in spans)
        threads = self._threads.choose(rows)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        begin = time.perf_counter()
        logits = self._forward(spans)
        read = self._weight_bytes + self._token_bytes * sum(span.kv.length for span in spans)
        self._threads.record(rows, threads, time.perf_counter() - begin, read)
        return logits

    def _forward(self, spans: Sequence[Span]) -> list[Logits]:
        seated = self._seats.seat([_block(span) for span in spans if len(span.ids) == 1])
        seats = {id(kv): at for at, kv in enumerate(seated)}
        order = sorted(
            range(len(spans)), key=lambda index: (id(spans[index].adapter), seats.get(id(spans[index].kv), len(seats)))
        )
        rows, groups = self._lay_out([spans[index] for index in order])
        ids = [token for index in order for token in spans[index].ids]
        positions = [at for span in rows for at in range(span.kv.length, span.kv.length + span.count)]
        shape = self._shape
        attention = StepAttention(
            rows, self._seats.blocks, seated, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim
        )
        hidden = F.embedding(torch.tensor(ids, device=self._device), self._weights.embedding)  # [N, hidden]
        cos, sin = self._rope(positions)
        for index, layer in enumerate(self._weights.layers):
            hidden = self._attend(index, layer, hidden, cos, sin, attention, groups)
            hidden = self._mlp(index, layer, hidden, groups)
        kept = [
            at for index, span in zip(order, rows, strict=True) for at in range(span.end - spans[index].keep, span.end)
        ]
        if len(kept) < len(ids):
            hidden = hidden[torch.tensor(kept, dtype=torch.long, device=self._device)]
        hidden = self._norm(hidden, self._weights.norm)
        logits: list[Logits] = [HiddenLogits(hidden[:0], self._weights.head)] * len(spans)
        at = 0
        for index, span in zip(order, rows, strict=True):
            span.kv.length += span.count
            logits[index] = HiddenLogits(hidden[at : at + spans[index].keep], self._weights.head)
            at += spans[index].keep
        return logits

    def last(self, logits: Sequence[Logits]) -> Tensor:
        last = [rows.hidden[-1:] for rows in logits if isinstance(rows, HiddenLogits)]
        assert len(last) == len(logits)
        return self._weights.head(torch.cat(last))

    def _lay_out(self, spans: Sequence[Span]) -> tuple[list[Rows], list[_Group]]:
        rows: list[Rows] = []
        groups: list[_Group] = []
        at = 0
        last: Adapter | None = None
        for span in spans:
            kv, count = _block(span), len(span.ids)
            kv.reserve(kv.length + count)
            rows.append(Rows(at, at + count, kv))
            if span.adapter is not None:
                pairs = span.adapter.weights
                assert isinstance(pairs, list)
                begin = groups.pop()[0] if span.adapter is last else at
                groups.append((begin, at + count, pairs))
            last = span.adapter
            at += count
        return rows, groups

    def _rope(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, 1, head_dim]. The first half of sin is negated: rotating is x cos + roll(x) sin."""
        angles = torch.tensor(positions, dtype=torch.float32, device=self._device)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x / √(mean x² + eps) * weight, in fewer kernels than torch's own."""
        width = x.shape[-1]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, length.mul_(width**-0.5).hypot_(self._root_eps)).mul_(weight)

    def _add_adapters(self, index: int, name: str, y: Tensor, x: Tensor, groups: Sequence[_Group]) -> None:
        """Add each adapter's part to its rows of y, a projection of x."""
        for begin, end, pairs in groups:
            pair = pairs[index].get(name)
            if pair is not None:
                pair.add_to(y[begin:end], x[begin:end])

    def _attend(
        self,
        index: int,
        layer: Layer,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: StepAttention,
        groups: Sequence[_Group],
    ) -> Tensor:
        """Return hidden + attention(norm(hidden)); hidden may be overwritten, as in `_mlp`."""
        shape = self._shape
        x = self._norm(hidden, layer.attention_norm)
        projected = layer.qkv(x)
        if groups:
            for name, y in zip(QKV, layer.qkv.split(projected), strict=True):
                self._add_adapters(index, name, y, x, groups)
        qkv = projected.view(x.shape[0], -1, shape.head_dim)
        qk = qkv[:, : shape.heads + shape.kv_heads]  # normed and rotated in place
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk[:, : shape.heads], qk[:, shape.heads :]
            q.copy_(self._norm(q, layer.q_norm))
            k.copy_(self._norm(k, layer.k_norm))
        turned = qk.roll(shape.head_dim // 2, -1)
        qk.mul_(cos).addcmul_(turned, sin)
        seen = attention(index, qkv)
        hidden = layer.out.plus(seen, hidden)
        self._add_adapters(index, OUT, hidden, seen, groups)
        return hidden

    def _mlp(self, index: int, layer: Layer, hidden: Tensor, groups: Sequence[_Group]) -> Tensor:
        x = self._norm(hidden, layer.mlp_norm)
        if any(GATE in pairs[index] or UP in pairs[index] for _, _, pairs in groups):
            gate, up = layer.gate(x), layer.up(x)
            self._add_adapters(index, GATE, gate, x, groups)
            self._add_adapters(index, UP, up, x, groups)
            gated = F.silu(gate).mul_(up)
        else:
            gated = layer.up.times(x, layer.gate.silu(x))
        hidden = layer.down.plus(gated, hidden)
        self._add_adapters(index, DOWN, hidden, gated, groups)
        return hidden

    # -- weights -------------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, folder: Path) -> Adapter:
        shapes = [layer.shapes for layer in self._weights.layers]
        return Adapter(name, read_adapter(folder, shapes, self._device))

    def drop_adapter(self, adapter: Adapter) -> None:
        """Do no work: the adapter is freed with its last reference."""

    def load_weights(self, folder: Path) -> None:
        try:
            shape = read_shape(folder)
        except (OSError, ValueError) as error:
            raise EngineRefused(f"{folder} is not a model: {error}", status=400) from error
        if shape != self._shape:
            raise EngineRefused(f"{folder} is another model than the one that runs", status=400)
        self._weights = read_weights(folder, self._shape, self._device)


def _block(span: Span) -> BlockKV:
    assert isinstance(span.kv, BlockKV)
    return span.kv

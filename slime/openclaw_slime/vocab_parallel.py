"""Log-probs from logits whose vocabulary is cut over the ranks of tensor parallelism: torch alone, no Megatron.

Promises: the numbers and gradients of `openclaw_rl.losses.log_probs_of` on the whole vocabulary, in fp32 at least. A
call costs one log-sum-exp and one gather for any number of ids a position, and two collectives, with no collective in
backward. Backward keeps the logits themselves, which live anyway. It recomputes the softmax, `chunk` positions at a
time, into the one gradient that must exist.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This rank's columns of the vocabulary: `[start, start + columns)`."""

    group: dist.ProcessGroup | None = None
    """None: the vocabulary is whole."""
    start: int = 0
    vocab_size: int | None = None
    """Number of ids; columns beyond are padding, outside the distribution. None: no padding."""

    @classmethod
    def of(cls, group: dist.ProcessGroup, columns: int, vocab_size: int) -> "VocabShard":
        return cls(group, group.rank() * columns, vocab_size)

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(values, op=op, group=self.group)

    def columns(self, width: int) -> int:
        """Return how many of this rank's `width` columns are ids."""
        return width if self.vocab_size is None else max(0, min(width, self.vocab_size - self.start))


def gathered_log_probs(
    logits: Tensor, ids: Tensor, temperature: Tensor, shard: VocabShard, *, chunk: int = 1024
) -> Tensor:
    """Return log softmax(logits / temperature)[ids].

    Shapes: logits [N, V/ranks], ids [N, K], temperature [N]; returns [N, K].
    """
    found: Tensor = _Gathered.apply(logits, ids, temperature, shard, chunk)
    return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: Tensor, shard: VocabShard, chunk: int) -> Tensor:
        dtype, columns = torch.promote_types(logits.dtype, torch.float32), shard.columns(logits.shape[1])
        temperature = temperature.to(dtype).unsqueeze(-1)  # [N, 1]
        local, mine = _local(ids, shard.start, columns)
        largest = logits.new_full((len(ids), 1), -torch.inf, dtype=dtype)
        if columns:
            largest = logits[:, :columns].amax(-1, keepdim=True).to(dtype) / temperature
        shard.reduce(largest, dist.ReduceOp.MAX)
        found = logits.new_zeros((len(ids), ids.shape[1] + 1), dtype=dtype)  # [:, K]: the sum of exp
        for at in range(0, len(ids) if columns else 0, chunk):
            rows = slice(at, at + chunk)
            scaled = logits[rows, :columns].to(dtype) / temperature[rows] - largest[rows]
            found[rows, :-1] = scaled.gather(-1, local[rows]).masked_fill(~mine[rows], 0)
            found[rows, -1] = scaled.exp_().sum(-1)
        shard.reduce(found, dist.ReduceOp.SUM)
        log_sum = found[:, -1:].log()
        ctx.save_for_backward(logits, local, mine, temperature, largest + log_sum)
        ctx.columns, ctx.chunk = columns, chunk
        return found[:, :-1] - log_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = grads
        logits, local, mine, temperature, normaliser = ctx.saved_tensors
        total = grad.sum(-1, keepdim=True)
        own = grad.masked_fill(~mine, 0)
        given = torch.zeros_like(logits)
        for at in range(0, len(logits) if ctx.columns else 0, ctx.chunk):
            rows = slice(at, at + ctx.chunk)
            part = (logits[rows, : ctx.columns].to(grad.dtype) / temperature[rows] - normaliser[rows]).exp_()
            part.mul_(-total[rows]).scatter_add_(-1, local[rows], own[rows]).div_(temperature[rows])
            given[rows, : ctx.columns] = part.to(given.dtype)
        return given, None, None, None, None


def _local(ids: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return each id's column on this rank (0 for another rank's id), and a mask of this rank's ids."""
    local = ids - start
    mine = (local >= 0) & (local < columns)
    return local.masked_fill(~mine, 0), mine

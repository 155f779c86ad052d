"""Linear layers y = x Wᵀ + b on a CPU, by the fastest of torch's kernels for each number of rows.

All of these kernels are plain fp32 products. Decoding is bound by reading W once per step. MKL's path behind `F.linear`
uses a third of one core's bandwidth for few rows; the same product with the weight on the left does not have that
limit. For several rows oneDNN is faster, most of all over weights in its own blocked order. Those are a second copy,
made for small models when a step first has several rows. Measured on 2 cores of an AMD EPYC, a pass of a 135M model's
linear layers: one row 44 → 15 ms, four rows 60 → 22 ms, eight rows 56 → 38 ms, and a third less with blocked weights.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 5
_WIDE = 1024
"""Input width from which oneDNN is faster from three rows."""
_PACKED_ROWS = range(3, 33)
"""Numbers of rows for packed weights: fewer are slower, and a prompt's chunk gains too little for a second copy."""


class Linear:
    """A linear layer over a weight that it does not copy, unless it may pack it."""

    __slots__ = ("_halves", "_has_onednn", "_may_pack", "_on_cpu", "_packed", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, may_pack: bool = False) -> None:
        self.weight, self.bias = weight, bias
        out_features, in_features = weight.shape
        self._on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
        self._has_onednn = self._on_cpu and torch.backends.mkldnn.is_available()
        self._may_pack = may_pack and self._has_onednn
        self._packed: Tensor | None = None
        # A batch of two halves: a product with one column would run on one core.
        self._halves = (
            weight.view(2, out_features // 2, in_features) if self._on_cpu and out_features % 2 == 0 else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [N, in], contiguous, to [N, out], contiguous."""
        rows, width = x.shape
        if not self._on_cpu or rows == 0:
            return F.linear(x, self.weight, self.bias)
        if (packed := self._packed_for(rows)) is not None:
            return _onednn(x, packed, self.bias)
        if rows == 1 and self._halves is not None:
            y = torch.bmm(self._halves, x.t().unsqueeze(0).expand(2, -1, -1)).view(1, -1)
        elif rows <= _FEW_ROWS and (rows == 2 or width < _WIDE or not self._has_onednn):
            y = torch.mm(self.weight, x.t()).t().contiguous()
        elif self._has_onednn:
            return _onednn(x, self.weight, self.bias)
        else:
            return F.linear(x, self.weight, self.bias)
        return y if self.bias is None else y.add_(self.bias)

    # An operation on a product costs no time while the product is in the cache: packed weights do both in one kernel.

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y + self(x); y may be overwritten."""
        packed = self._packed_for(x.shape[0])
        return y.add_(self(x)) if packed is None else _onednn_binary(x, y, packed, self.bias, "add")

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y * self(x); y may be overwritten."""
        packed = self._packed_for(x.shape[0])
        return y.mul_(self(x)) if packed is None else _onednn_binary(x, y, packed, self.bias, "mul")

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(self(x))."""
        packed = self._packed_for(x.shape[0])
        return F.silu(self(x)) if packed is None else _onednn(x, packed, self.bias, "swish")

    def _packed_for(self, rows: int) -> Tensor | None:
        if not (self._may_pack and rows in _PACKED_ROWS):
            return None
        if self._packed is None:
            self._packed = _pack(self.weight)
        return self._packed


class FusedLinear:
    """Layers that read the same input, their outputs side by side: one product where the weights are packed."""

    __slots__ = ("_bias", "_may_pack", "_packed", "layers")

    def __init__(self, layers: Sequence[Linear], *, may_pack: bool = False) -> None:
        self.layers = tuple(layers)
        self._may_pack = may_pack and layers[0].weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        whole = self._fused(x)
        if whole is not None:
            return whole
        return torch.cat([layer(x) for layer in self.layers], 1)

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        """Return each layer's part of the joined output."""
        return whole.split([layer.weight.shape[0] for layer in self.layers], 1)

    def _fused(self, x: Tensor) -> Tensor | None:
        if not (self._may_pack and x.shape[0] in _PACKED_ROWS):
            return None
        if self._packed is None:
            self._packed = _pack(torch.cat([layer.weight for layer in self.layers]))
            if any(layer.bias is not None for layer in self.layers):
                zeros = [layer.weight.new_zeros(layer.weight.shape[0]) for layer in self.layers]
                biases = [
                    zero if layer.bias is None else layer.bias for layer, zero in zip(self.layers, zeros, strict=True)
                ]
                self._bias = torch.cat(biases)
        return _onednn(x, self._packed, self._bias)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return packed


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, then: str = "none") -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")
    return y


def _onednn_binary(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None, then: str) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, then)
    return y

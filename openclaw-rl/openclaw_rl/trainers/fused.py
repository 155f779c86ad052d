"""LoRA layers, linear layers and norms in fewer or faster kernels.

On a GPU a small model's step waits for kernel launches more than for arithmetic.

A LoRA layer is three products and a sum, y = W x + s B A x. Here it takes five launches where PEFT takes nine, and no
temporaries as wide as its output. A norm takes one.

On a CPU a step is its fp32 products, forward and backward. There oneDNN computes them: MKL, behind torch's own, uses
half of the width of an AMD processor's vectors (measured on an EPYC: 108 beside 240 GFLOP/s on one core).

Promises: values and gradients are PEFT's and the layer's own, within the rounding of the precision computed in. Layers
of other kinds are left alone.

Leaves to others: which models are trained so (`lora`, `policy`).
"""

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

ADAPTER = "default"
_HEAD_ROWS = 64
"""Positions whose logits exist at once: they are read four times, from the processor's cache."""


class LoraProduct(torch.autograd.Function):
    """x [N, I], weight [O, I], a [R, I], b [O, R] → weight x + scale b a x [N, O], in x's precision.

    `a` and `b` may have a wider precision; their gradients have it too.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        down, up = a.to(x.dtype), b.to(x.dtype)
        low = _product(x, down)  # [N, R]
        out = _add_product(_product(x, weight, bias), low, up, scale)
        ctx.save_for_backward(x, weight, down, up, low)
        ctx.scale, ctx.precision = scale, a.dtype  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        (g,) = gradients
        x, weight, down, up, low = ctx.saved_tensors
        low_g = _product(g, up.t()).mul_(ctx.scale)  # [N, R]
        to_a = _product(low_g.t(), x.t()).to(ctx.precision)
        to_b = _product(low.t(), g.t()).t().to(ctx.precision).mul_(ctx.scale)
        to_x = _add_product(_product(g, weight.t()), low_g, down.t()) if ctx.needs_input_grad[0] else None
        return to_x, None, None, to_a, to_b, None


class LinearProduct(torch.autograd.Function):
    """x [N, I], weight [O, I], bias [O] → weight x + bias [N, O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            _product(g, weight.t()) if to_x else None,
            _product(g.t(), x.t()) if to_weight else None,
            g.sum(0) if to_bias else None,
        )


class HeadLogProbs(torch.autograd.Function):
    """hidden [N, H], ids [N], temperature [N], weight [V, H] → log softmax(weight hidden / temperature)[ids] [N].

    The gradient of such a value is (weight[id] − Σ_v p_v weight[v]) / temperature. It is taken while the logits are
    there, so backward computes no logits again. Memory is `_HEAD_ROWS` * V beside N * H.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ids: Tensor, temperature: Tensor, weight: Tensor) -> Tensor:
        found, gradients = [], []
        for h, i, t in zip(*(values.split(_HEAD_ROWS) for values in (hidden, ids, temperature)), strict=True):
            logits = _product(h, weight).div_(t[:, None])  # [n, V]
            picked = logits.gather(-1, i[:, None])[:, 0]
            largest = logits.amax(-1, keepdim=True)
            weights = logits.sub_(largest).exp_()  # not normalised
            total = weights.sum(-1, keepdim=True)
            found.append(picked - largest[:, 0] - total[:, 0].log())
            if ctx.needs_input_grad[0]:
                mean = _product(weights, weight.t()).div_(total)  # [n, H]
                gradients.append(weight[i].sub_(mean).div_(t[:, None]))
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (g,), (of_hidden,) = gradients, ctx.saved_tensors
        return g[:, None] * of_hidden, None, None, None


def has_fast_head(hidden: Tensor, weight: Tensor) -> bool:
    """Return True where `HeadLogProbs` is to be used: a frozen head in fp32, on a CPU."""
    return not weight.requires_grad and _has_onednn(hidden, weight)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weightᵀ + bias [N, O]. The inputs may be transposed views."""
    if not _has_onednn(x, weight):
        return F.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _add_product(y: Tensor, x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Return y + scale x weightᵀ; y may be overwritten."""
    if not _has_onednn(x, weight):
        return y.addmm_(x, weight.t(), alpha=scale)
    x = x if scale == 1.0 else x * scale
    summed: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, y, weight, None, "add")
    return summed


def _has_onednn(x: Tensor, weight: Tensor) -> bool:
    is_fp32 = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
    return is_fp32 and torch.backends.mkldnn.is_available() and 0 not in x.shape


def fuse_lora(model: nn.Module) -> int:
    """Give PEFT's plain LoRA layers the product above. Return their number."""
    layers = [module for module in model.modules() if type(module) is PeftLinear and _is_plain(module)]
    for layer in layers:
        layer.forward = _forward_of(layer)
    return len(layers)


def _is_plain(layer: PeftLinear) -> bool:
    return (
        type(layer.base_layer) is nn.Linear
        and not layer.fan_in_fan_out
        and not layer.lora_variant
        and isinstance(layer.lora_dropout[ADAPTER], nn.Identity)
        and layer.lora_A[ADAPTER].bias is None
        and layer.lora_B[ADAPTER].bias is None
    )


def _forward_of(layer: PeftLinear) -> Callable[..., Tensor]:
    own, base = layer.forward, layer.base_layer
    a, b, scale = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, layer.scaling[ADAPTER]

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if layer.disable_adapters or layer.merged or args or kwargs or layer.active_adapters != [ADAPTER]:
            result: Tensor = own(x, *args, **kwargs)
            return result
        flat = x.to(base.weight.dtype).flatten(0, -2)
        out: Tensor = LoraProduct.apply(flat, base.weight, base.bias, a, b, scale)
        return out.view(*x.shape[:-1], -1)

    return forward


def fuse_linears(model: nn.Module) -> int:
    """Give a CPU's fp32 linear layers the product above. Return their number."""
    layers = [m for m in model.modules() if type(m) is nn.Linear and _has_onednn(m.weight, m.weight)]
    for layer in layers:
        layer.forward = _linear_of(layer)  # type: ignore[method-assign, assignment]
    return len(layers)


def _linear_of(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    own = layer.forward

    def forward(x: Tensor) -> Tensor:
        if not _has_onednn(x, layer.weight):
            return own(x)
        out: Tensor = LinearProduct.apply(x.flatten(0, -2), layer.weight, layer.bias)
        return out.view(*x.shape[:-1], -1)

    return forward


@torch.no_grad()
def fuse_norms(model: nn.Module) -> int:
    """Give norms of the form x / rms(x) · weight torch's own kernel, if it gives their values. Return their number."""
    fused = 0
    for module in model.modules():
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float) or weight is None:
            continue
        x = torch.linspace(-2, 3, 4 * len(weight), device=weight.device).view(4, -1).to(weight.dtype)
        own, norm = module(x), _norm_of(weight, eps)
        if own.dtype == x.dtype and torch.allclose(norm(x).float(), own.float(), rtol=0.02, atol=1e-3):
            module.forward = norm
            fused += 1
    return fused


def _norm_of(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    shape = tuple(weight.shape)
    return lambda hidden_states: F.rms_norm(hidden_states, shape, weight, eps)

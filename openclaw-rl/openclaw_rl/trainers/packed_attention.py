"""Attention over sequences packed one behind the other in a single row; no sequence sees another.

    row        a a a a b b b c c c c c        positions   0 1 2 3 0 1 2 0 1 2 3 4

Promises: each sequence's numbers are those it has alone, within the kernel's rounding. Memory grows with the row's
length and not with its square, but for a sequence with a mask of its own (`_split`) and for soft caps.

Two kernels compute the same: `varlen` (torch's own variable-length flash attention, CUDA, 16 bits) and `split` (one
causal SDPA call a sequence; any device and type). `choose_kernel` measures both on the card, gradients included, and
takes the first only where they agree.

Leaves to others: positions, and whether a model's layers pass the layout on (`architecture` measures that).
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION_NAME = "openclaw_rl_packed"
"""Name of `packed_attention` in transformers' registry. Without a layout it is transformers' `sdpa`, and soft caps."""
_LARGEST_HEAD = 256
_TOLERANCE = 0.03
"""Between two 16-bit kernels on values of size one. A neighbour that is seen changes them by ten times as much."""

Kernel = Literal["varlen", "varlen_wide", "split"]
"""`varlen_wide`: for a torch whose kernel needs as many heads of keys as of queries."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Lengths and bounds of the sequences of a row.

    A sequence may begin in another one of the row, and then lies here from where it leaves that one.
    """

    lengths: tuple[int, ...]
    starts: Tensor  # [S + 1] int32, on the device: 0, then the end of each sequence
    kernel: Kernel
    seen: tuple[Tensor | None, ...]
    """For each sequence the row's places of all its tokens, its beginning included; None: its own places alone."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        kernel: Kernel = "split",
        places: Sequence[Sequence[int]] | None = None,
    ) -> "PackedLayout":
        """places: for each sequence those of all its tokens, where some begin in others. They need the plain kernel."""
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        seen: list[Tensor | None] = [None] * len(lengths)
        for at, (length, of) in enumerate(zip(lengths, places or (), strict=places is not None)):
            if len(of) > length:
                seen[at] = torch.tensor(of, device=device)
        if kernel != "split" and any(tensor is not None for tensor in seen):
            raise ValueError(f"the kernel {kernel} knows no sequence that begins in another")
        return cls(tuple(lengths), starts, kernel, tuple(seen))

    @property
    def positions(self) -> Tensor:
        """[1, T]: each token's position in its own sequence."""
        firsts = (0 if of is None else len(of) - length for of, length in zip(self.seen, self.lengths, strict=True))
        places = torch.cat([torch.arange(first, first + n) for first, n in zip(firsts, self.lengths, strict=True)])
        return places.unsqueeze(0).to(self.starts.device)


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """A layer's attention scores: scale · q·k, soft-capped, of the keys in a window."""

    scale: float
    window: int | None = None
    """A token sees itself and the `window - 1` before it; None: all before it."""
    softcap: float | None = None

    @classmethod
    def of(cls, head_dim: int, options: Mapping[str, Any]) -> "ScoreRule":
        """Read the rule from the options that transformers gives to an attention function.

        Raises NotImplementedError for an option that packed attention does not support.
        """
        unknown = [name for name in ("s_aux", "position_bias", "cache") if options.get(name) is not None]
        if unknown or options.get("dropout"):
            raise NotImplementedError(f"packed attention knows no {', '.join(unknown) or 'dropout'}")
        scaling = options.get("scaling")
        scale = head_dim**-0.5 if scaling is None else scaling
        return cls(scale, options.get("sliding_window"), options.get("softcap"))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention; transformers calls this function.

    Shapes: query [1, Hq, T, D], key and value [1, Hkv, T, D]; returns [1, T, Hq, D]. With a layout the mask is not
    read. Raises NotImplementedError for an option that it does not support.
    """
    if packed_layout is None:
        if options.get("softcap") is not None:  # sdpa would ignore it
            return _capped(query, key, value, attention_mask, options), None
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return plain
    rule = ScoreRule.of(query.shape[-1], options)
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [T, H, D]
    use_varlen = packed_layout.kernel != "split" and rule.softcap is None and _fits_varlen(q, k, v)
    mixed = (_varlen if use_varlen else _split)(q, k, v, packed_layout, rule)
    return mixed.unsqueeze(0), None


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> Tensor:
    """Return [R, N, Hq, D]: soft-capped attention of padded rows. mask: bool [R, 1, N, N], or None for a causal one."""
    rule = ScoreRule.of(q.shape[-1], options)
    cap = options["softcap"]
    return _soft_capped(q, k, v, rule, cap, mask).transpose(1, 2)


def register() -> None:
    """Register `packed_attention` with transformers. Safe to call twice."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def choose_kernel(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    """Return the fast kernel if its outputs and gradients on three short sequences equal the plain kernel's."""
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 33, 18)

    def draw(n: int) -> Tensor:
        return torch.randn(sum(lengths), n, head_dim, generator=generator).to(device, dtype)

    inputs, weights = (draw(heads), draw(kv_heads), draw(kv_heads)), draw(heads)
    if device.type != "cuda" or not _fits_varlen(*inputs) or not _varlen_parameters():
        return "split"

    def run(kernel: Kernel) -> list[Tensor]:
        q, k, v = (tensor.clone().requires_grad_() for tensor in inputs)
        attend = _split if kernel == "split" else _varlen
        with torch.enable_grad():
            out = attend(q, k, v, PackedLayout.of(lengths, device, kernel), ScoreRule(head_dim**-0.5))
            return [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))]

    plain = run("split")
    kernels: tuple[Kernel, ...] = ("varlen", "varlen_wide")
    for kernel in kernels:
        try:
            pairs = zip(run(kernel), plain, strict=True)
            if all(bool((a - b).abs().max() <= _TOLERANCE * b.abs().max()) for a, b in pairs):
                return kernel
        except (RuntimeError, ValueError):  # a card or a build without this kernel
            continue
    return "split"


def _fits_varlen(query: Tensor, key: Tensor, value: Tensor) -> bool:
    dim = query.shape[-1]
    is_half = query.dtype in (torch.bfloat16, torch.float16) and query.dtype == key.dtype == value.dtype
    return is_half and query.is_cuda and key.shape[-1] == value.shape[-1] == dim <= _LARGEST_HEAD and dim % 8 == 0


def _varlen(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, rule: ScoreRule) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    attend: Any = varlen_attn  # its signature grows from one torch to the next
    longest, known = max(layout.lengths), _varlen_parameters()
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and layout.kernel == "varlen_wide":
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        groups = 1
    more: dict[str, Any] = {"enable_gqa": groups > 1} if "enable_gqa" in known else {}
    # The window counts the token itself: with W of them a token sees the W - 1 before it.
    sides = (-1 if rule.window is None or rule.window >= longest else rule.window - 1, 0)
    more |= {"scale": rule.scale, "window_size": sides}
    starts = layout.starts
    mixed: Tensor = attend(query, key, value, starts, starts, longest, longest, **more)
    return mixed


def _varlen_parameters() -> Mapping[str, inspect.Parameter]:
    """Return the parameters of this torch's `varlen_attn`; empty if it is missing or takes no scale or window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return {}
    known = inspect.signature(varlen_attn).parameters
    return known if {"scale", "window_size"} <= known.keys() else {}


def _split(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, rule: ScoreRule) -> Tensor:
    """Attend sequence by sequence with torch's own kernel.

    A sequence with a stem (it begins in another one), or longer than the window, gets a dense [queries, keys] mask: its
    memory grows with their product, and the kernel's causal form does not apply.
    """
    ends = [0, *accumulate(layout.lengths)]
    parts = []
    for (start, end), seen in zip(pairwise(ends), layout.seen, strict=True):
        if start == end:
            continue
        whole = (tensor[start:end] if seen is None else tensor.index_select(0, seen) for tensor in (key, value))
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query[start:end], *whole))  # [1, H, N, D]
        is_grouped = q.shape[1] != k.shape[1]
        if rule.softcap is not None:
            out = _soft_capped(q, k, v, rule, rule.softcap)
        elif seen is None and (rule.window is None or rule.window >= end - start):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scale, enable_gqa=is_grouped)
        else:
            mask = _visible(q.shape[2], k.shape[2], rule.window, q.device)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale, enable_gqa=is_grouped)
        parts.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(parts)


def _soft_capped(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, cap: float, visible: Tensor | None = None) -> Tensor:
    """Compute Gemma 2's scores, cap · tanh(score / cap), by the plain formula: torch has no kernel for them.

    visible: bool [R, 1, N, N]; the rule's own window when None.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    scores = torch.tanh(q @ k.transpose(-1, -2) * rule.scale / cap) * cap
    visible = _visible(q.shape[-2], k.shape[-2], rule.window, q.device) if visible is None else visible
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
    return weights.to(v.dtype) @ v


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return [queries, keys] bool: a token sees itself and the `window - 1` before it.

    The queries are those of the last keys.
    """
    place = torch.arange(keys, device=device)
    distance = place[keys - queries :, None] - place[None, :]
    return (distance >= 0) & (distance < (window or keys))

"""Sampler for many policies of one Llama base at once: each product of a layer is one batched product over them.

The start of kernels bounds a decode step of a 135M model, so R policies cost little more than one. Adapters are merged
into stacked copies of the weights. All is fp32, so that the log-probs agree with the trainer's to rounding (each
training step reports the distance: `abs_log_ratio`). Draws come from uniform numbers made beforehand on the CPU: equal
seeds give equal draws on any device and beside any other policies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Ids

_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True, slots=True)
class Reply:
    ids: Ids  # [T], the end token included
    log_probs: tuple[float, ...]  # [T], of the temperature-scaled distribution


class Fleet:
    def __init__(self, policies: Sequence[LoraPolicy], end_id: int) -> None:
        self._policies, self._end_id = list(policies), end_id
        model = policies[0].model.get_base_model()
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings().weight
        config = model.config
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._eps = config.rms_norm_eps
        self._weights = [
            {name: self._stacked(number, parts) for name, parts in _FUSED.items()}
            for number in range(config.num_hidden_layers)
        ]

    @torch.no_grad()
    def _stacked(self, layer: int, parts: Sequence[str], into: Tensor | None = None) -> Tensor:
        """Return base + scaling · B A of every policy, [R, in, out]."""
        merged = []
        for policy in self._policies:
            rows = []
            for part in parts:
                linear = policy.model.get_base_model().get_decoder().layers[layer].get_submodule(part)
                a, b = linear.lora_A["default"].weight, linear.lora_B["default"].weight
                rows.append(linear.base_layer.weight + linear.scaling["default"] * (b @ a))
            merged.append(torch.cat(rows).T)
        return torch.stack(merged, out=into) if into is not None else torch.stack(merged)

    def refresh(self) -> None:
        """Take the policies' weights as they are now."""
        for number, weights in enumerate(self._weights):
            for name, parts in _FUSED.items():
                self._stacked(number, parts, into=weights[name])

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[Ids]], max_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> list[list[Reply]]:
        """Sample one reply for each prompt of each policy: [R][B] in, [R][B] out. All policies have the same B."""
        r, b, device = len(prompts), len(prompts[0]), self._head.device
        ids, visible = _left_padded([prompt for own in prompts for prompt in own])
        ids, visible = ids.to(device), visible.to(device)
        uniforms = torch.stack(
            [torch.rand(max_tokens, b, generator=torch.Generator().manual_seed(seed)) for seed in seeds], 1
        ).to(device)  # [max_tokens, R, B]
        n, width = ids.shape
        length = width + max_tokens
        cache = [
            tuple(torch.zeros(n, self._kv_heads, length, self._head_dim, device=device) for _ in range(2))
            for _ in self._weights
        ]
        seen = torch.cat([visible, torch.ones(n, max_tokens, dtype=torch.bool, device=device)], -1)
        positions = (visible.long().cumsum(-1) - 1).clamp(min=0)  # [N, P]
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        mask = visible[:, None, :] & causal  # [N, P, P]
        mask |= torch.eye(
            width, dtype=torch.bool, device=device
        )  # padding attends to itself, or its softmax would be nan
        drawn, told = [], []
        ended = torch.zeros(n, dtype=torch.bool, device=device)
        at, step_ids = 0, ids
        for k in range(max_tokens):
            hidden = self._forward(step_ids, positions, mask, cache, at, r)[:, -1]  # [N, H]
            log_probs = torch.log_softmax(functional.linear(hidden, self._head) / temperature, -1)
            cumulative = log_probs.exp().cumsum(-1)
            u = uniforms[k].reshape(n, 1) * cumulative[:, -1:]
            token = torch.searchsorted(cumulative, u, right=True).clamp(max=log_probs.shape[-1] - 1)  # [N, 1]
            drawn.append(token[:, 0])
            told.append(log_probs.gather(-1, token)[:, 0])
            ended |= token[:, 0] == self._end_id
            if k % 8 == 7 and bool(ended.all()):
                break
            at += step_ids.shape[1]
            step_ids, positions = token, positions[:, -1:] + 1
            mask = seen[:, None, : at + 1]
        tokens, values = torch.stack(drawn, -1).tolist(), torch.stack(told, -1).tolist()
        replies = [self._reply(*row) for row in zip(tokens, values, strict=True)]
        return [replies[k : k + b] for k in range(0, n, b)]

    def _reply(self, tokens: list[int], values: list[float]) -> Reply:
        stop = tokens.index(self._end_id) + 1 if self._end_id in tokens else len(tokens)
        return Reply(tuple(tokens[:stop]), tuple(values[:stop]))

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: list[tuple[Tensor, ...]], at: int, r: int
    ) -> Tensor:
        """Return the hidden states [N, P, H] of `ids` [N, P] after the first `at` cached positions; fill the cache."""
        n, p = ids.shape
        hidden = self._decoder.embed_tokens(ids)
        cos, sin = self._decoder.rotary_emb(hidden, positions)
        groups = self._heads // self._kv_heads
        scale = self._head_dim**-0.5
        bias = torch.zeros(mask.shape, device=ids.device).masked_fill(~mask, -torch.inf)[:, None, None]  # [N,1,1,P,L]

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return torch.bmm(x.reshape(r, -1, x.shape[-1]), weight).view(n, p, -1)

        for layer, weights, (keys, values) in zip(self._decoder.layers, self._weights, cache, strict=True):
            x = _rms_norm(hidden, layer.input_layernorm.weight, self._eps)
            q, k, v = (
                part.view(n, p, -1, self._head_dim).transpose(1, 2)
                for part in product(x, weights["qkv"]).split(
                    [heads * self._head_dim for heads in (self._heads, self._kv_heads, self._kv_heads)], -1
                )
            )  # [N, heads, P, D]
            keys[:, :, at : at + p], values[:, :, at : at + p] = _rotated(k, cos, sin), v
            seen_k, seen_v = keys[:, :, : at + p], values[:, :, : at + p]
            q = _rotated(q, cos, sin).reshape(n, self._kv_heads, groups * p, self._head_dim)
            scores = (q @ seen_k.transpose(-1, -2)).view(n, self._kv_heads, groups, p, at + p) * scale + bias
            mixed = scores.softmax(-1).view(n, self._kv_heads, groups * p, at + p) @ seen_v
            mixed = mixed.view(n, self._heads, p, self._head_dim).transpose(1, 2).reshape(n, p, -1)
            hidden = hidden + product(mixed, weights["out"])
            x = _rms_norm(hidden, layer.post_attention_layernorm.weight, self._eps)
            gate, up = product(x, weights["gate_up"]).chunk(2, -1)
            hidden = hidden + product(functional.silu(gate) * up, weights["down"])
        return _rms_norm(hidden, self._decoder.norm.weight, self._eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]  # [N, 1, P, D]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _left_padded(prompts: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    visible = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], visible[row, width - len(prompt) :] = torch.tensor(prompt), True
    return ids, visible


def sample(
    fleet: Fleet, prompts: Sequence[Sequence[Ids]], tokens: int, temperature: float, seeds: Sequence[int], chunk: int
) -> list[list[Reply]]:
    """Sample one reply for each prompt of each policy, in calls of `chunk` prompts a policy.

    Policies may have different numbers of prompts: the last prompt fills a call up, and its replies are left out.
    """
    most = max(map(len, prompts))
    found: list[list[Reply]] = [[] for _ in prompts]
    for part, start in enumerate(range(0, most, chunk)):
        filled = [_filled(own, start + chunk)[start : start + chunk] for own in prompts]
        seeds_here = [seed + 10_000_000 * part for seed in seeds]
        for own, replies in zip(found, fleet.generate(filled, tokens, temperature, seeds_here), strict=True):
            own += replies
    return [own[: len(its)] for own, its in zip(found, prompts, strict=True)]


def _filled(some: Sequence[Ids], length: int) -> list[Ids]:
    """Return the items with the last repeated, up to `length`; more items stay."""
    return [*some, *[some[-1]] * (length - len(some))]

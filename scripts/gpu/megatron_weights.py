"""Weights of a small Qwen3 in Megatron's layout: Hugging Face tensors under Megatron's names, and each rank's shard."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    vocab: int = 49152
    hidden: int = 1024
    ffn: int = 3072
    heads: int = 16
    groups: int = 8
    head_dim: int = 128
    layers: int = 8
    replies: tuple[tuple[int, int], ...] = ((61, 120), (200, 33), (17, 400), (512, 1), (90, 255))
    """Prompt and response tokens of each reply."""


TINY = Shape(256, 32, 64, 4, 2, 8, 2, ((5, 6), (9, 3), (4, 7), (6, 1), (3, 8)))


def full_tensors(shape: Shape, source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the Hugging Face tensors under Megatron's names, unsharded."""
    found = {
        "embedding.word_embeddings.weight": source["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": source["model.norm.weight"],
    }
    groups, width, hidden = shape.groups, shape.head_dim, shape.hidden
    for n in range(shape.layers):
        hf, mg = f"model.layers.{n}.", f"decoder.layers.{n}."
        q = source[hf + "self_attn.q_proj.weight"].view(groups, -1, hidden)
        k = source[hf + "self_attn.k_proj.weight"].view(groups, width, hidden)
        v = source[hf + "self_attn.v_proj.weight"].view(groups, width, hidden)
        found[mg + "self_attention.linear_qkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, hidden)
        found[mg + "self_attention.linear_qkv.layer_norm_weight"] = source[hf + "input_layernorm.weight"]
        found[mg + "self_attention.linear_proj.weight"] = source[hf + "self_attn.o_proj.weight"]
        found[mg + "self_attention.q_layernorm.weight"] = source[hf + "self_attn.q_norm.weight"]
        found[mg + "self_attention.k_layernorm.weight"] = source[hf + "self_attn.k_norm.weight"]
        gate, up = source[hf + "mlp.gate_proj.weight"], source[hf + "mlp.up_proj.weight"]
        found[mg + "mlp.linear_fc1.weight"] = torch.stack([gate, up])
        found[mg + "mlp.linear_fc1.layer_norm_weight"] = source[hf + "post_attention_layernorm.weight"]
        found[mg + "mlp.linear_fc2.weight"] = source[hf + "mlp.down_proj.weight"]
    return found


def is_cut(name: str) -> bool:
    return name.endswith(("linear_fc1.weight", "linear_qkv.weight", "embeddings.weight", "proj.weight", "fc2.weight"))


def shard(name: str, tensor: Tensor, rank: int, tp: int) -> Tensor:
    if name.endswith("linear_fc1.weight"):  # gate and up are sharded apart, then stacked
        return tensor.chunk(tp, 1)[rank].reshape(-1, tensor.shape[-1])
    if name.endswith(("linear_qkv.weight", "word_embeddings.weight")):
        return tensor.chunk(tp, 0)[rank]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(tp, 1)[rank]
    return tensor

"""Reads a Llama-family config.json: the numbers of the forward, or None for a model that needs another forward.

It does without transformers, whose import costs seconds and memory at every start of the engine; only a scaled rope
asks it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_SCALED_ROPES = frozenset({"linear", "llama3", "yarn"})
"""Ropes whose frequencies do not depend on the length of the text."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that make one member of the family."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    vocab_size: int
    is_tied: bool
    """Whether the output head is the embedding."""
    rope_type: str
    rope_theta: float


def read_shape(folder: Path) -> Shape | None:
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_bytes())
    windows = set(config.get("layer_types") or ()) - {"full_attention"}
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    # Configs written before transformers 5 have `rope_theta` beside `rope_scaling`.
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if (
        config.get("model_type") not in FAMILY
        or config.get("hidden_act") != "silu"
        or config.get("quantization_config")
        or windows
        or window
        or rope_type not in _SCALED_ROPES | {"default"}
        or rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0
    ):
        return None
    try:
        heads = config["num_attention_heads"]
        return Shape(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config["num_key_value_heads"] or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            eps=config["rms_norm_eps"],
            vocab_size=config["vocab_size"],
            is_tied=config.get("tie_word_embeddings", False),
            rope_type=rope_type,
            rope_theta=rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"],
        )
    except KeyError:
        return None  # a default of transformers' config class: let transformers run it


def rope_frequencies(folder: Path, shape: Shape) -> tuple[Tensor, float]:
    """([head_dim / 2] inverse frequencies, factor of cos and sin), as transformers computes them."""
    if shape.rope_type == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float) / shape.head_dim
        return 1.0 / (shape.rope_theta**exponents), 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    frequencies, factor = ROPE_INIT_FUNCTIONS[shape.rope_type](config)
    return frequencies, factor

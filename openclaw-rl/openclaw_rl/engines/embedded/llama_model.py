"""Reader of a Llama-family model folder: the shape from config.json, the weights from its safetensors.

Weights in fp32 on the CPU are mapped, not copied.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from openclaw_rl.engines.embedded.linear import FusedLinear, Linear
from openclaw_rl.errors import EngineRefused

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_SCALED_ROPES = frozenset({"linear", "llama3", "yarn"})
"""Ropes whose frequencies do not depend on the length of the text."""
QKV, OUT, GATE, UP, DOWN = ("q_proj", "k_proj", "v_proj"), "o_proj", "gate_proj", "up_proj", "down_proj"
PROJECTIONS = (*QKV, OUT, GATE, UP, DOWN)
_PACK_BELOW = 1 << 30
"""Bytes of a model up to which its weights may be held twice (`linear`)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that distinguish one member of the family from another."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    vocab_size: int
    is_tied: bool
    """The output head is the embedding."""
    rope_type: str
    rope_theta: float


def read_shape(folder: Path) -> Shape | None:
    """Return the shape that config.json gives; None for a model that needs another forward."""
    # Without transformers: its import costs seconds and memory at every start of the engine.
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
    """Return ([head_dim / 2] inverse frequencies, factor of cos and sin), as transformers computes them."""
    if shape.rope_type == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float) / shape.head_dim
        return 1.0 / (shape.rope_theta**exponents), 1.0
    # Only a scaled rope pays for this import.
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    frequencies, factor = ROPE_INIT_FUNCTIONS[shape.rope_type](config)
    return frequencies, factor


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Weights of one decoder layer."""

    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: FusedLinear
    out: Linear
    gate: Linear
    up: Linear
    down: Linear

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The weight shape of every projection, by name."""
        layers = [*self.qkv.layers, self.out, self.gate, self.up, self.down]
        return {name: linear.weight.shape for name, linear in zip(PROJECTIONS, layers, strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of the whole model."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Linear


def read_weights(folder: Path, shape: Shape, device: torch.device) -> Weights:
    """Read the weights. Raises EngineRefused when the folder does not hold this architecture's tensors."""
    tensors: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt", device=str(device)) as opened:
                # float() does not copy what is fp32 already.
                tensors |= {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
        weights = _assemble(tensors, shape)
    except KeyError as error:
        raise EngineRefused(f"{folder} lacks the tensor {error}", status=400) from error
    except (OSError, SafetensorError) as error:
        raise EngineRefused(f"{folder} cannot be read: {error}", status=400) from error
    if weights.embedding.shape != (shape.vocab_size, shape.hidden):
        raise EngineRefused(f"{folder} does not fit its config.json", status=400)
    return weights


def _assemble(tensors: Mapping[str, Tensor], shape: Shape) -> Weights:
    may_pack = sum(tensor.nbytes for tensor in tensors.values()) <= _PACK_BELOW

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}."

        def linear(path: str, may_pack: bool) -> Linear:
            weight, bias = tensors[f"{prefix}{path}.weight"], tensors.get(f"{prefix}{path}.bias")
            return Linear(weight, bias, may_pack=may_pack)

        return Layer(
            attention_norm=tensors[f"{prefix}input_layernorm.weight"],
            mlp_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
            q_norm=tensors.get(f"{prefix}self_attn.q_norm.weight"),
            k_norm=tensors.get(f"{prefix}self_attn.k_norm.weight"),
            qkv=FusedLinear([linear(f"self_attn.{name}", False) for name in QKV], may_pack=may_pack),
            out=linear("self_attn.o_proj", may_pack),
            gate=linear("mlp.gate_proj", may_pack),
            up=linear("mlp.up_proj", may_pack),
            down=linear("mlp.down_proj", may_pack),
        )

    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if shape.is_tied else tensors.get("lm_head.weight", embedding)
    return Weights(
        embedding=embedding,
        layers=[layer(index) for index in range(shape.layers)],
        norm=tensors["model.norm.weight"],
        head=Linear(head, may_pack=may_pack),
    )

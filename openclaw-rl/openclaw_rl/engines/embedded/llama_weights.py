"""The weights of a Llama-family model as its safetensors hold them: mapped, not copied, when in fp32 and on the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from openclaw_rl.engines.embedded.linear import FusedLinear, Linear
from openclaw_rl.engines.embedded.llama_shape import Shape
from openclaw_rl.errors import EngineRefused

QKV, OUT, GATE, UP, DOWN = ("q_proj", "k_proj", "v_proj"), "o_proj", "gate_proj", "up_proj", "down_proj"
PROJECTIONS = (*QKV, OUT, GATE, UP, DOWN)
_PACK_BELOW = 1 << 30
"""Bytes of a model up to which its weights may be held twice (`linear`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
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
        """Of every projection, by name."""
        layers = [*self.qkv.layers, self.out, self.gate, self.up, self.down]
        return {name: linear.weight.shape for name, linear in zip(PROJECTIONS, layers, strict=True)}


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Linear


def read_weights(folder: Path, shape: Shape, device: torch.device) -> Weights:
    """Raises EngineRefused when the folder does not hold this architecture's tensors."""
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

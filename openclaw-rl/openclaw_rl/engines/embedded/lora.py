"""Reads a PEFT LoRA folder into per-layer low-rank pairs: y += x Aᵀ Bᵀ, the scale folded into B."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from openclaw_rl.errors import EngineRefused

_KEY = re.compile(r"base_model\.model\.(model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    a_t: Tensor  # [in, r]
    b_t: Tensor  # [r, out]

    def add_to(self, y: Tensor, x: Tensor) -> None:
        y.addmm_(x @ self.a_t, self.b_t)


LayerPairs = dict[str, LowRank]
"""By projection name (`q_proj`)."""


def read_adapter(folder: Path, shapes: list[dict[str, torch.Size]], device: torch.device) -> list[LayerPairs]:
    """One entry per layer. shapes: the base's weights by layer and projection. Raises EngineRefused for what we would
    serve wrong.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_bytes())
        tensors = load_file(folder / "adapter_model.safetensors", device=str(device))
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineRefused(f"{folder} is not a PEFT adapter: {error}", status=400) from error
    if config.get("peft_type", "LORA") != "LORA" or config.get("use_dora") or config.get("bias", "none") != "none":
        raise EngineRefused(f"{folder}: only plain LoRA is served (no DoRA, no biases)", status=400)
    halves: dict[str, dict[str, Tensor]] = {}
    places: dict[str, tuple[int, str]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or int(match[2]) >= len(shapes) or match[3] not in shapes[int(match[2])]:
            raise EngineRefused(f"{folder}: the model has no place for {key}", status=400)
        places[match[1]] = int(match[2]), match[3]
        halves.setdefault(match[1], {})[match[4]] = tensor.float()
    layers: list[LayerPairs] = [{} for _ in shapes]
    for module, (layer, name) in places.items():
        out_features, in_features = shapes[layer][name]
        a, b = halves[module].get("A"), halves[module].get("B")
        if (
            a is None
            or b is None
            or (a.shape[1], b.shape[0]) != (in_features, out_features)
            or a.shape[0] != b.shape[1]
        ):
            raise EngineRefused(f"{folder}: {module} does not fit the model", status=400)
        scale = _scale(config, module, a.shape[0])
        layers[layer][name] = LowRank(a.t().contiguous(), (b * scale).t().contiguous())
    return layers


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """alpha / r, or alpha / √r; the first pattern that ends the module's path overrides alpha, as in PEFT."""
    alpha = float(config["lora_alpha"])
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)

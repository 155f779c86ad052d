"""LoRA adapters: a registry of the loaded ones and their requests, and the reader of PEFT folders.

The registry (`Adapters`) belongs to the event loop. A request holds its adapter from arrival to end, so an unload waits
for the holders and never removes the weights of a running reply. From the call of `unload` on, the name is unknown to
new requests. `read_adapter` reads a folder into low-rank pairs per layer: y += x Aᵀ Bᵀ, the scale folded into B.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from openclaw_rl.engines.embedded.runner import Adapter
from openclaw_rl.errors import EngineRefused

_KEY = re.compile(r"base_model\.model\.(model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight")


class Adapters:
    """Registry of the loaded adapters and of the number of requests that hold each."""

    def __init__(self, load: Callable[[str, Path], Adapter], drop: Callable[[Adapter], Awaitable[None]]) -> None:
        """load: reads a PEFT folder, in a thread of its own. drop: frees an adapter that no request holds."""
        self._load, self._drop = load, drop
        self._loaded: dict[str, Adapter] = {}
        self._folders: dict[str, Path] = {}
        self._loading: set[str] = set()
        self._users: dict[Adapter, int] = {}
        self._idle: dict[Adapter, asyncio.Event] = {}
        """Per adapter that is being unloaded: set when its last request releases it."""

    @property
    def names(self) -> list[str]:
        return list(self._loaded)

    @property
    def folders(self) -> dict[str, Path]:
        """The folder that each adapter was loaded from, by name."""
        return {name: self._folders[name] for name in self._loaded}

    async def load(self, name: str, folder: Path) -> None:
        """Load the adapter under a new name. Raises EngineRefused."""
        if name in self._loaded or name in self._loading:
            raise EngineRefused(f"LoRA adapter {name!r} is already loaded", status=400)
        self._loading.add(name)
        try:
            self._loaded[name] = await asyncio.to_thread(self._load, name, folder)
            self._folders[name] = folder
        finally:
            self._loading.discard(name)

    async def unload(self, name: str) -> None:
        """Return when the adapter's last request has ended and its weights are free. Raises EngineRefused."""
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            raise EngineRefused(f"LoRA adapter {name!r} is not loaded", status=400)
        if adapter in self._users:
            self._idle[adapter] = asyncio.Event()
            await self._idle[adapter].wait()
            del self._idle[adapter]
        await self._drop(adapter)

    def hold(self, name: str | None) -> Adapter | None:
        """Return the adapter and hold it until `release`; None for the base. Raises EngineRefused."""
        if name is None:
            return None
        loaded = self._loaded.get(name)
        if loaded is None:
            raise EngineRefused(
                f"LoRA adapter {name!r} is not loaded; loaded: {', '.join(self._loaded) or 'none'}", status=400
            )
        self._users[loaded] = self._users.get(loaded, 0) + 1
        return loaded

    def release(self, adapter: Adapter) -> None:
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            if adapter in self._idle:
                self._idle[adapter].set()


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The two factors of one projection's adapter, transposed."""

    a_t: Tensor  # [in, r]
    b_t: Tensor  # [r, out]

    def add_to(self, y: Tensor, x: Tensor) -> None:
        y.addmm_(x @ self.a_t, self.b_t)


LayerPairs = dict[str, LowRank]
"""The pairs of one layer, by projection name (`q_proj`)."""


def read_adapter(folder: Path, shapes: list[dict[str, torch.Size]], device: torch.device) -> list[LayerPairs]:
    """Read a PEFT folder, one entry per layer. Raises EngineRefused for an adapter that we would serve wrong.

    shapes: those of the base's weights, by layer and projection.
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
    """Return alpha / r, or alpha / √r. The first pattern that ends the module's path overrides alpha, as in PEFT."""
    alpha = float(config["lora_alpha"])
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)

"""What the device of a policy has room for: decides whether a pass keeps its activations or computes them again.

An estimate from the model's shape (`memory_budget`) against what the card has free right now. Where it is wrong memory
runs out, once: `assume_less`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from openclaw_rl.errors import SettingsError
from openclaw_rl.memory_budget import ModelShape, activation_bytes
from openclaw_rl.settings import TrainerSettings

_MARGIN = 0.8
"""Of the free memory: the estimate is of Llama-like layers, and gradients flow too."""


class Card:
    def __init__(self, device: torch.device, token_bytes: int | None, fraction: float | None) -> None:
        """token_bytes: activations of one token; None: this model's layers are not known, so never keep them."""
        self._device, self._token_bytes, self._fraction = device, token_bytes, fraction
        self._keeps_little = False
        if device.type == "cuda" and fraction is not None:
            torch.cuda.set_per_process_memory_fraction(fraction, device)

    @classmethod
    def of(cls, config: Mapping[str, Any], device: torch.device, settings: TrainerSettings) -> "Card":
        try:
            token_bytes: int | None = activation_bytes(ModelShape.of(config), recompute=False)
        except SettingsError:
            token_bytes = None
        return cls(device, token_bytes, settings.memory_fraction)

    def holds_activations_of(self, tokens: int) -> bool:
        if self._keeps_little:
            return False
        if self._device.type != "cuda":
            return True
        return self._token_bytes is not None and tokens * self._token_bytes <= _MARGIN * self._free()

    def assume_less(self) -> bool:
        """Memory ran out: from now on every pass recomputes. False when that was so already."""
        kept_more, self._keeps_little = not self._keeps_little, True
        return kept_more

    def _free(self) -> float:
        free, total = torch.cuda.mem_get_info(self._device)
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        free += reserved - allocated  # the allocator's own, to be used again
        return free if self._fraction is None else min(free, self._fraction * total - allocated)

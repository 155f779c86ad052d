"""Llama 3's scaled rotary embedding under slime, which switches it on and leaves the factor at Megatron's default.

Llama 3.1 has that factor, 8; Llama 3.2 has 32, and would be trained as another model than the engine serves. Megatron
knows the argument (`--rope-scaling-factor`), so what it says is put in place once the model is built.
"""

# mypy: disable-error-code="import-not-found"

from argparse import Namespace
from collections.abc import Iterable
from typing import Any


def set_factor(args: Namespace, chunks: Iterable[Any]) -> None:
    """Before the first forward pass: the embedding keeps what it computed."""
    if not args.use_rope_scaling:
        return
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, RotaryEmbedding):
            module.inv_freq = RotaryEmbedding(
                kv_channels=2 * len(module.inv_freq),
                rotary_percent=1.0,
                rotary_base=args.rotary_base,
                rope_scaling=True,
                rope_scaling_factor=args.rope_scaling_factor,
                use_cpu_initialization=module.inv_freq.device.type == "cpu",
            ).inv_freq

"""Memory of one GPU that trains, by arithmetic from the checkpoint's `config.json`. No import of slime or torch.

    weights        2 bytes a parameter (bfloat16)        over TP × PP
    gradients      4 bytes a parameter (fp32)            over TP × PP
    optimizer     12 bytes a parameter (fp32: master, two moments)   over all GPUs that train
    activations    one hidden state a token and layer (the rest is recomputed), 34 while one layer is computed, and the
                   logits with their gradient, all in bfloat16 and over TP

The estimate leaves out the CUDA context, NCCL's buffers and what the allocator loses; `SHARE` is the room for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_slime.layout import Layout

GB = 1e9
SHARE = 0.85
"""Share of a card that the estimate may fill."""
CARD_GB = 80.0
"""Memory of an H100."""
_LAYER_STATES = 34
"""Hidden states of 2 bytes that a layer keeps for its backward pass (arXiv:2205.05198, with flash attention)."""


@dataclass(frozen=True, slots=True)
class ActorMemory:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def without_optimizer(self) -> float:
        return self.weights + self.gradients + self.activations

    def fits(self, card_gb: float, *, optimizer_on_cpu: bool) -> bool:
        used = self.without_optimizer + (0.0 if optimizer_on_cpu else self.optimizer)
        return used <= SHARE * card_gb * GB

    def line(self, card_gb: float, *, optimizer_on_cpu: bool) -> str:
        """Return the estimate as one line for people."""
        where = "CPU" if optimizer_on_cpu else "GPU"
        used = self.without_optimizer + (0.0 if optimizer_on_cpu else self.optimizer)
        parts = f"weights {self.weights / GB:.1f} + gradients {self.gradients / GB:.1f}"
        parts += f" + activations {self.activations / GB:.1f} + optimizer {self.optimizer / GB:.1f} (on the {where})"
        return f"  an actor GPU: {parts}: {used / GB:.0f} of {card_gb:g} GB"


def parameters(config: Mapping[str, Any]) -> int:
    """Return the number of parameters of a decoder; linear attention counts as full attention."""
    config = {**config, **(config.get("text_config") or {})}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads", heads)
    attention = hidden * head * (2 * heads + 2 * groups)
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    width = config["moe_intermediate_size"] * experts if experts else config["intermediate_size"]
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    layers: int = config["num_hidden_layers"]
    return int(embeddings + layers * (attention + 3 * hidden * width))


def actor_memory(config: Mapping[str, Any], layout: Layout, max_tokens_per_gpu: int) -> ActorMemory:
    """Return the estimate of a step whose micro-batches are full."""
    count = parameters(config)
    config = {**config, **(config.get("text_config") or {})}
    shards = layout.actor_tp * layout.pipeline_parallel
    states = config["num_hidden_layers"] / layout.pipeline_parallel + _LAYER_STATES
    numbers = states * config["hidden_size"] + 2 * config["vocab_size"]
    return ActorMemory(
        weights=2 * count / shards,
        gradients=4 * count / shards,
        optimizer=12 * count / layout.training_gpus,
        activations=2 * max_tokens_per_gpu * numbers / layout.actor_tp,
    )

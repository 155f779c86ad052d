"""Estimate of the GPU memory for serving and training a model: arithmetic on its shape, without torch or a card.

The figures are bytes. Weights, adapters, moments, KV cache and logits are exact sums. Activations follow the tensors
that the layers of a Llama-like model keep for their backward pass. `RESERVE` covers the rest (two CUDA contexts,
captured graphs, the allocator's rounding). `scripts/benchmarks/trainer_speed.py` prints the estimates beside
measurements.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openclaw_rl.errors import SettingsError

GB = 10**9
GIB = 2**30
RESERVE = 2 * GIB
"""Reserve of a shared card: contexts, captured graphs, rounding."""
SERVED_TOKENS = 16384
"""Tokens of KV cache that an agent's prompts need."""
LEAST_CONTEXT = 1024
LOGITS_AT_ONCE = 2**26
_BITS = {"none": 16.0, "8bit": 8.1, "4bit": 4.5}
"""Bits of a linear layer's weight, with its share of the scales. Embeddings and norms keep 16 bits."""

Quantise = Literal["none", "8bit", "4bit"]
QUANTISATIONS: tuple[Quantise, ...] = ("none", "8bit", "4bit")
_NAMES = {"none": "16", "8bit": "8", "4bit": "4"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a model that its memory depends on."""

    layers: int
    hidden: int
    query: int
    """Heads times their size."""
    key: int
    """Key-value heads times their size."""
    inner: int
    vocabulary: int
    tied: bool
    parameters: int

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int | None = None) -> "ModelShape":
        """Read a `config.json` (of a multi-modal model, its text part). Raises SettingsError."""
        config = config.get("text_config") or config
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            size = int(config.get("head_dim") or hidden // heads)
            layers, inner = int(config["num_hidden_layers"]), int(config["intermediate_size"])
            vocabulary, tied = int(config["vocab_size"]), bool(config.get("tie_word_embeddings", False))
        except (KeyError, TypeError, ValueError) as error:
            raise SettingsError(f"config.json does not say the model's shape: {error}") from error
        query, key = heads * size, int(config.get("num_key_value_heads") or heads) * size
        linear = layers * (hidden * (2 * query + 2 * key) + 3 * hidden * inner)
        if parameters is None:
            parameters = linear + vocabulary * hidden * (1 if tied else 2) + (2 * layers + 1) * hidden
        return cls(layers, hidden, query, key, inner, vocabulary, tied, parameters)

    @classmethod
    def of_folder(cls, folder: Path) -> "ModelShape":
        """Read a Hugging Face folder; count the parameters in its safetensors. Raises SettingsError."""
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise SettingsError(f"{folder}: config.json cannot be read") from error
        files = sorted(folder.glob("*.safetensors"))
        return cls.of(config, sum(map(_parameters_in, files)) or None)

    @property
    def embeddings(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def kv_token(self) -> int:
        """Bytes of one token in a 16-bit KV cache."""
        return 2 * 2 * self.layers * self.key

    def weights(self, quantise: Quantise = "none") -> int:
        linear = max(0, self.parameters - self.embeddings)
        return round(linear * _BITS[quantise] / 8) + 2 * self.embeddings

    def adapter_parameters(self, rank: int) -> int:
        """Return the parameters of a LoRA on the seven projections."""
        width = (self.hidden + self.query) * 2 + (self.hidden + self.key) * 2 + (self.hidden + self.inner) * 3
        return self.layers * rank * width

    @property
    def activation_token(self) -> int:
        """Bytes that one token leaves in one layer for the backward pass (16 bits, the norms in 32)."""
        return 12 * self.hidden + 10 * self.query + 8 * self.key + 8 * self.inner


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes of a trainer during its largest pass."""

    weights: int
    trained: int
    """Masters, gradients and moments."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.trained + self.activations + self.logits


def training(
    shape: ModelShape,
    tokens: int,
    *,
    weights: Literal["lora", "full"] = "lora",
    rank: int = 16,
    quantise: Quantise = "none",
    recompute: bool = True,
) -> TrainingMemory:
    """Return the memory of a pass of `tokens` positions."""
    # fp32 masters, gradients and two moments are 16 bytes a trained parameter.
    trained = 16 * (shape.adapter_parameters(rank) if weights == "lora" else shape.parameters)
    return TrainingMemory(
        weights=shape.weights(quantise),
        trained=trained,
        activations=tokens * activation_bytes(shape, recompute=recompute),
        logits=_logits(shape),
    )


def activation_bytes(shape: ModelShape, *, recompute: bool) -> int:
    """Return the bytes of one token. Recomputing keeps each layer's input, and one layer's activations."""
    ends = 12 * shape.hidden  # embeddings, the last norm, the hidden states that the head reads
    if not recompute:
        return shape.layers * shape.activation_token + ends
    return shape.layers * 2 * shape.hidden + shape.activation_token + ends


def _logits(shape: ModelShape) -> int:
    """Return the bytes of one chunk of logits: 16 bits, fp32, scaled, and the gradients of these."""
    return 16 * max(LOGITS_AT_ONCE, 64 * shape.vocabulary)


@dataclass(frozen=True, slots=True)
class Budget:
    """One way to share a card between SGLang and a trainer."""

    served: Quantise
    """SGLang's weights."""
    quantise: Quantise
    """The trainer's base."""
    serving: int
    """Weights and KV cache of SGLang."""
    training: int
    """The trainer's base, adapter and logits, without the part that grows with the tokens."""
    context: int
    """Tokens of the longest sample that trains beside it with recomputation; 0: it does not fit."""
    memory_fraction: float
    """The value for `engine.memory_fraction`."""


def share(shape: ModelShape, gpu_bytes: float, *, rank: int = 16, served_tokens: int = SERVED_TOKENS) -> list[Budget]:
    """Return the budgets of SGLang, with a cache of `served_tokens`, and a LoRA trainer on one card.

    16 bits served beside each precision of the trainer's base, then 8 bits beside 4.
    """
    found = []
    ways: list[tuple[Quantise, Quantise]] = [*(("none", quantise) for quantise in QUANTISATIONS), ("8bit", "4bit")]
    for served, quantise in ways:
        serving = shape.weights(served) + served_tokens * shape.kv_token
        fixed = training(shape, 0, rank=rank, quantise=quantise).total
        left = gpu_bytes - RESERVE - serving - fixed
        context = max(0, int(left // activation_bytes(shape, recompute=True)))
        memory_fraction = round(min(0.95, (serving + GIB) / gpu_bytes), 2)
        found.append(Budget(served, quantise, serving, fixed, context, memory_fraction))
    return found


def largest_context(
    shape: ModelShape, gpu_bytes: float, *, weights: Literal["lora", "full"] = "lora", quantise: Quantise = "none"
) -> int:
    """Return the tokens of the longest sample that trains on a card of its own; 0: it does not fit."""
    fixed = training(shape, 0, weights=weights, quantise=quantise).total
    return max(0, int((gpu_bytes - RESERVE / 2 - fixed) // activation_bytes(shape, recompute=True)))


def report(shape: ModelShape, gpu_memory_gb: float, *, rank: int = 16) -> list[str]:
    """Return the estimates as lines for `openclaw-rl doctor`."""
    card = gpu_memory_gb * GIB
    lines = [
        f"{shape.parameters / 1e9:.2f} B parameters on {gpu_memory_gb:g} GB (SGLang caches {SERVED_TOKENS} tokens):"
    ]
    for budget in share(shape, card, rank=rank):
        bits = f"LoRA, {_NAMES[budget.served]} bits served, a base of {_NAMES[budget.quantise]}"
        sums = f"SGLang {budget.serving / GIB:.1f} GB + trainer {budget.training / GIB:.1f} GB"
        fits = (
            f"samples of up to {budget.context} tokens train; engine.memory_fraction = {budget.memory_fraction:g}"
            if budget.context >= LEAST_CONTEXT
            else "does not fit"
        )
        lines.append(f"  {bits}: {sums}: {fits}")
    alone = largest_context(shape, card, weights="full")
    lines.append(
        f"  full weights, trainer alone on the card: {f'{alone} tokens' if alone >= LEAST_CONTEXT else 'does not fit'}"
    )
    return lines


def _parameters_in(file: Path) -> int:
    """Count the elements in the header of a safetensors file; quantised weights count as they are stored."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file}: not a safetensors file") from error
    count = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            size = 1
            for length in tensor["shape"]:
                size *= length
            count += size
    return count

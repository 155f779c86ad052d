"""From a Hugging Face `config.json` to Megatron's model arguments.

slime compares these with the checkpoint and refuses a difference, so they are read from the checkpoint instead of
being kept in a table of models. Dense decoders with grouped-query attention: Qwen2, Qwen3, Llama (SmolLM is one).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openclaw_rl.errors import SettingsError

QWEN3_4B: Mapping[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""The shape of Qwen3-4B-Thinking-2507, so that `--dry-run` shows the real argv without a checkpoint."""

_PLAIN: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}
"""What the map takes for granted; a checkpoint that says otherwise would be trained as another model."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron knows no others."""
_QK_NORM = {"qwen2": False, "qwen3": True, "llama": False}
_QKV_BIAS = {"qwen2": True, "qwen3": False, "llama": False}


def read_config(checkpoint: Path) -> Mapping[str, Any]:
    """Raises SettingsError when the folder holds no readable config."""
    try:
        config: Mapping[str, Any] = json.loads((checkpoint / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(f"HF_CKPT {checkpoint}: no readable config.json ({error})") from error
    return config


def model_arguments(config: Mapping[str, Any]) -> list[str]:
    """Megatron's arguments for this architecture. Raises SettingsError for one we have no map for."""
    kind = config.get("model_type")
    if kind not in _QK_NORM:
        raise SettingsError(f"HF_CKPT: architecture {kind!r} is not one of {', '.join(_QK_NORM)}")
    heads = config["num_attention_heads"]
    for name, plain in _PLAIN.items():
        if config.get(name, plain) not in (plain, None):
            raise SettingsError(f"HF_CKPT: config.json has {name} {config[name]!r}; only {plain!r} is mapped")
    arguments = ["--swiglu", "--num-layers", config["num_hidden_layers"], "--hidden-size", config["hidden_size"]]
    arguments += ["--ffn-hidden-size", config["intermediate_size"], "--num-attention-heads", heads]
    arguments += ["--group-query-attention", "--num-query-groups", config.get("num_key_value_heads", heads)]
    arguments += ["--kv-channels", config.get("head_dim") or config["hidden_size"] // heads]
    arguments += ["--use-rotary-position-embeddings", *_rope(config), "--disable-bias-linear"]
    arguments += ["--normalization", "RMSNorm", "--norm-epsilon", config["rms_norm_eps"]]
    arguments += ["--vocab-size", config["vocab_size"]]
    if _QK_NORM[kind]:
        arguments.append("--qk-layernorm")
    if _QKV_BIAS[kind]:
        arguments.append("--add-qkv-bias")
    if not config.get("tie_word_embeddings", False):
        arguments.append("--untie-embeddings-and-output-weights")
    return [str(argument) for argument in arguments]


def _rope(config: Mapping[str, Any]) -> list[object]:
    """The base, and Llama 3's scaling; other kinds are refused. Older configs say it in `rope_scaling`."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    base = config.get("rope_theta") or rope.get("rope_theta")
    if base is None:
        raise SettingsError("HF_CKPT: config.json names no rope_theta")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return ["--rotary-base", int(base)]
    if kind != "llama3" or any(rope.get(name) != value for name, value in _LLAMA3.items()):
        raise SettingsError(f"HF_CKPT: rotary embedding {rope} is not mapped; the plain one and Llama 3's are")
    return ["--rotary-base", int(base), "--use-rope-scaling", "--rope-scaling-factor", float(rope["factor"])]

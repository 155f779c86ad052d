"""From a model folder to a runner, and the facts a folder states about its model."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from openclaw_rl.engines.embedded.llama_runner import LlamaRunner
from openclaw_rl.engines.embedded.llama_shape import read_shape
from openclaw_rl.engines.embedded.runner import Runner
from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import EngineSettings, ModelSettings


def load_runner(folder: Path, model: ModelSettings, engine: EngineSettings) -> Runner:
    """The fast runner where it knows the architecture, else the one that runs transformers' own model."""
    length = context_length(folder, model)
    device = torch.device(engine.device)
    shape = read_shape(folder)
    if shape is not None:
        on_cpu = device.type == "cpu"
        return LlamaRunner(
            folder,
            shape,
            context_length=length,
            device=device,
            threads=(engine.threads or os.cpu_count() or 1) if on_cpu else 1,
            seats=engine.max_running if on_cpu else 0,
        )
    # Imported here: transformers' model code costs seconds and memory that the fast runner does without.
    from transformers import AutoModelForCausalLM

    from openclaw_rl.engines.embedded.transformers_runner import TransformersRunner

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return TransformersRunner(loaded.to(device).eval(), context_length=length)


def context_length(folder: Path, model: ModelSettings) -> int:
    """Prompt and reply together: the model's own, or less when the settings say so."""
    config = _read(folder / "config.json")
    own = config.get("max_position_embeddings") or config.get("n_positions")
    own = own or config.get("text_config", {}).get("max_position_embeddings")
    if own is None and model.context_length is None:
        raise SettingsError(f"{folder}/config.json states no context length: set model.context_length")
    if own is not None and model.context_length is not None and model.context_length > own:
        raise SettingsError(f"model.context_length {model.context_length} is more than the model's own {own}")
    return int(model.context_length or own)


def end_ids(folder: Path) -> frozenset[int]:
    """The tokens that end a reply, from everything that names them: generation config, config and tokenizer."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read(folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = _read(folder / "tokenizer.json").get("added_tokens", []) if text else []
    return frozenset(found | {entry["id"] for entry in added if entry["content"] == text})


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes()) if file.is_file() else {}

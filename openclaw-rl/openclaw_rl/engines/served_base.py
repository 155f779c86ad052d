"""Which base an engine serves: the hash that the ledger, the trainer and every adapter are tied to.

The embedded engine tells it. SGLang tells only the path it loaded, so the tensors in that folder are hashed here; a
folder that is not on this host is known by its path alone, and the local trainer will not train on it.
"""

from collections.abc import Sequence
from pathlib import Path

from openclaw_rl.engines.bundled import base_hash, resolve, tokenizer_folder
from openclaw_rl.engines.dialect import ModelInfo
from openclaw_rl.settings import ModelSettings


def served_base_hash(info: ModelInfo, model: ModelSettings, *, cache: Path, ours: Sequence[Path]) -> str:
    """ours: where full weights are sent from; an engine that took some names a folder there, not its base. Blocks."""
    if info.base_hash is not None:
        return info.base_hash
    named = Path(info.model_path)
    base = tokenizer_folder(model, cache)
    is_sent = any(named.is_relative_to(folder) for folder in ours)
    if is_sent or info.model_path == model.path or named.resolve() == base.resolve():
        return base_hash(resolve(model, cache))
    if any(named.glob("*.safetensors")):
        return base_hash(resolve(ModelSettings(path=str(named)), cache))
    return f"path:{info.model_path}"

"""Conversion of a GGUF, or of a folder with older weight files, to a plain fp32 safetensors folder.

The folder is written beside its place and renamed, so a reader never finds a part of it. If two processes race, the
later one keeps the folder of the first, whose bytes are the same.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from openclaw_rl.errors import SettingsError
from openclaw_rl.models.identity import hash_tensors

_ABANDONED_S = 3600


def convert(source: Path, folder: Path) -> None:
    """Write `source` as fp32 safetensors with config and tokenizer to `folder`. Raises SettingsError."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": source.name} if source.is_file() else {}
    origin = source.parent if source.is_file() else source
    try:
        with _parsed_once() if where else nullcontext():
            model = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32, local_files_only=True, **where)
            tokenizer = AutoTokenizer.from_pretrained(origin, local_files_only=True, **where)
    except (OSError, ValueError, KeyError, ImportError) as error:
        problem = str(error).strip().splitlines()[0]
        raise SettingsError(f"model.path {source}: transformers cannot load it: {problem}") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}-*"):  # of a killed process
        if time.time() - left.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        config = model.config.to_dict()
        config.pop("quantization_config", None)  # the tensors are plain now
        config.pop("_name_or_path", None)
        config |= {"architectures": [type(model).__name__], "dtype": "float32"}
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
        model.generation_config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "base_hash").write_text(hash_tensors(partial))
        for file in [*partial.iterdir(), partial]:
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        os.rename(partial, folder)
    except OSError as error:
        if not (folder / "base_hash").is_file():  # else another process was first, with the same bytes
            raise SettingsError(f"{folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already when it was renamed


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Have transformers parse a GGUF once, and make its map of names once."""
    # It parses the file for the config, the tensors and the tokenizer, and makes the map anew for each of the model's
    # modules: three quarters of a conversion. Neither object is changed by its readers.
    import gguf

    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(reader), cache(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map

"""The bundled model for tests: converted once for all runs of this checkout, whole and shortened.

Both are kept in a folder of pytest's cache. A lock lets one process convert while the others wait.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from openclaw_rl.models import convert, resolve
from openclaw_rl.settings import ModelSettings

LAYERS = 3
"""Layers of the shortened model. The bundled one has 30, and takes about seven times as long for a prompt."""
HIDDEN, INNER, HEADS, KV_HEADS = 192, 512, 6, 2
"""Sizes of the narrow model: width, width of the MLP, heads. The bundled one has 576, 1536, 9 and 3."""
_KEPT = {
    "embed_tokens": (None, HIDDEN),
    "q_proj": (HEADS * 64, HIDDEN),
    "k_proj": (KV_HEADS * 64, HIDDEN),
    "v_proj": (KV_HEADS * 64, HIDDEN),
    "o_proj": (HIDDEN, HEADS * 64),
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
}
"""First rows and columns of each matrix that the narrow model keeps. Of a norm it keeps the first weights."""


def whole(root: Path) -> Path:
    """Return a cache folder (`data_dir/cache`) that holds the converted bundled model."""
    cache = root / _key()
    with _locked(root):
        if not any(cache.glob("models/[!.]*/base_hash")):
            resolve.tokenizer_folder(ModelSettings(), cache)
    return cache


def shortened(root: Path) -> Path:
    """Return a model folder with the bundled model's tokenizer, template and shape, and its first layers alone.

    Its replies make no sense. It serves tests of the paths of a reply, a score or a step, at any quality of the model.
    """
    source = resolve.resolve(ModelSettings(), whole(root)).folder
    return _made(root / f"{_key()}-{LAYERS}-layers", partial(_shorten, source))


def narrowed(root: Path) -> Path:
    """Return the folder of the shortened model with the first third of its width: a token costs a quarter as much."""
    source = shortened(root)
    return _made(root / f"{source.name}-{HIDDEN}-wide", partial(_narrow, source))


def link(cache: Path, place: Path) -> None:
    """Give a data folder the cache without converting or copying again."""
    shutil.copytree(cache, place, copy_function=_link_or_copy)


def _made(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder; one process makes it, in a folder beside it that then gets its name."""
    with _locked(folder.parent):
        if not folder.is_dir():
            begun = Path(tempfile.mkdtemp(dir=folder.parent))
            make(begun)
            begun.rename(folder)
    return folder


def _copy(source: Path, folder: Path, changes: Mapping[str, int]) -> None:
    """Copy all but the weights and their hash; `changes` go into the configuration."""
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "base_hash":
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text()) | changes
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _shorten(source: Path, folder: Path) -> None:
    _copy(source, folder, {"num_hidden_layers": LAYERS})
    kept = {}
    with safe_open(source / "model.safetensors", framework="np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
            layer = name.partition(".layers.")[2].partition(".")[0]
            if not layer or int(layer) < LAYERS:
                kept[name] = tensors.get_tensor(name)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _narrow(source: Path, folder: Path) -> None:
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    _copy(source, folder, sizes)
    kept = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        rows, columns = _KEPT.get(name.split(".")[-2], (HIDDEN, None))
        kept[name] = np.ascontiguousarray(tensor[:rows, ...][..., :columns])
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _key() -> str:
    """Name the code that converts: another version of it converts anew."""
    sources = Path(convert.__file__).read_bytes() + Path(resolve.__file__).read_bytes()
    return hashlib.sha256(sources).hexdigest()[:12]


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)

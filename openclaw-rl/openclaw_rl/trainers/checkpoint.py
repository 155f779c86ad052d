"""Checkpoint folders: written whole or not at all, and verified when read.

    data_dir/versions/<lease_id>/   the learner's files, commit.json (the commit that publishes it), manifest.json

Promises: a folder under its final name is complete and on disk. `write` fills `.tmp-<lease_id>` and fsyncs every file
and the folder. It writes `manifest.json` (the sha256 of every other file) last, then renames. `verify` refuses a torn
folder by name and reason. One file may be missing: the optimizer state, which `prune` deletes from old versions.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from openclaw_rl.errors import TrainerError
from openclaw_rl.settings import TrainerSettings

MANIFEST_FILE, COMMIT_FILE = "manifest.json", "commit.json"
OPTIMIZER_FILE = "optimizer.state"
"""Safetensors by content, not by name."""  # SGLang reads every `*.safetensors` of an adapter's folder as weights
ADAPTER_CONFIG = "adapter_config.json"
EMA_FOLDER = "ema"
"""Folder of the EMA teacher below its version, in PEFT's format (`method.teacher = "ema"`)."""


def write(versions: Path, lease_id: str, fill: Callable[[Path], None]) -> Path:
    """Make `versions/<lease_id>` from the files that `fill` writes. On any failure no file stays."""
    unfinished, final = partial(versions, lease_id), versions / lease_id
    if not lease_id or Path(lease_id).name != lease_id or lease_id.startswith("."):
        raise TrainerError(f"lease id {lease_id!r} cannot name a folder")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(mode=0o700, parents=True)
        fill(unfinished)
        files = sorted(file for file in unfinished.rglob("*") if file.is_file())
        manifest = {"files": {file.relative_to(unfinished).as_posix(): sha256(file) for file in files}}
        (unfinished / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        for file in (*files, unfinished / MANIFEST_FILE):
            file.chmod(0o600)
            _fsync(file)
        for folder in (*{file.parent for file in files} - {unfinished}, unfinished):
            _fsync(folder)
        discard(final)
        unfinished.rename(final)
        _fsync(versions)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return final


def partial(versions: Path, lease_id: str) -> Path:
    """Return the path at which `write` builds the folder."""
    return versions / f".tmp-{lease_id}"


def verify(folder: Path) -> None:
    """Raise TrainerError, one line, unless the folder is whole."""
    try:
        files: dict[str, str] = json.loads((folder / MANIFEST_FILE).read_text())["files"]
        for name, digest in files.items():
            if name == OPTIMIZER_FILE and not (folder / name).exists():
                continue
            if sha256(folder / name) != digest:
                raise TrainerError(f"checkpoint {folder} is torn: {name} is not what its manifest says")
    except OSError as error:
        raise TrainerError(f"checkpoint {folder} is torn: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"checkpoint {folder} is torn: {MANIFEST_FILE} cannot be read") from error


def is_whole(folder: Path) -> bool:
    try:
        verify(folder)
    except TrainerError:
        return False
    return True


def is_pruned(folder: Path) -> bool:
    """Return True if `prune` deleted the optimizer state."""
    try:
        files = json.loads((folder / MANIFEST_FILE).read_text())["files"]
        return OPTIMIZER_FILE in files and not (folder / OPTIMIZER_FILE).exists()
    except (OSError, ValueError, KeyError, TypeError):
        return False  # torn, or another trainer's: `verify` reports that


def adapter_conflicts(folder: Path, settings: TrainerSettings, modules: Collection[str] | None = None) -> Iterator[str]:
    """Yield a line for each setting under which the adapter in this folder would mean something else.

    modules: those that the model's policy adapts; None: those of the settings, unless these have their default, which
    means other modules for some models.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        rank, alpha, found = int(config["r"]), float(config["lora_alpha"]), config["target_modules"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # torn, or another trainer's: `verify` and the engine report that
    if rank != settings.rank:
        yield f"trainer.rank is {settings.rank}, and it was made with {rank}"
    if alpha != settings.alpha:
        yield f"trainer.alpha is {settings.alpha:g}, and it was made with {alpha:g}"
    if modules is None and "target_modules" in settings.model_fields_set:
        modules = settings.target_modules
    if modules is not None and isinstance(found, list) and set(found) != set(modules):
        made = ", ".join(sorted(map(str, found)))
        yield f"trainer.target_modules are {', '.join(sorted(modules))}, and it was made with {made}"


def discard(folder: Path) -> None:
    """Delete a folder."""
    # The manifest first: half of the folder must never look like a checkpoint.
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def prune(versions: Path, keep: int, protected: Collection[Path]) -> None:
    """Delete optimizer states, except the newest `keep` and those of `protected`. The server deletes whole folders."""

    def age(state: Path) -> int:
        return state.stat().st_mtime_ns

    states = sorted(versions.glob(f"[!.]*/{OPTIMIZER_FILE}"), key=age, reverse=True)
    for state in states[keep:]:
        if state.parent not in protected:
            state.unlink(missing_ok=True)


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

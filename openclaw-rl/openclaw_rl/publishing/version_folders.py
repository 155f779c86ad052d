"""Version folders: keeps `versions/` and the ledger consistent.

At start the server deletes folders that no version names, and records optimizer states that the trainer pruned. While
it runs it deletes versions that can no longer be needed. The ledger forgets the folder first, so that a rollback is
refused and never finds half of it.

A crash can leave half a checkpoint, or a whole one that was never committed. The trainer may still commit a whole one
while its lease is live. So a folder stays if a version names it, or if its own name holds the live lease's id: trainers
name their folders so. The module reads only folders directly below `versions/`, and follows no links.

`not_finite` reads the files without torch: the *.safetensors of a folder, with an adapter's EMA teacher below it. It
finds NaN and infinity by the exponent bits, because numpy knows neither bfloat16 nor fp8. It needs the memory of one
block, and raises no exception for a broken file: the engine refuses such a file when it loads it. The FNUZ forms of
fp8, which no trainer of ours writes, are not read.
"""

import asyncio
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
import structlog

from openclaw_rl.errors import EngineRefused, LedgerError, SettingsError
from openclaw_rl.ledger import Ledger
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers import checkpoint
from openclaw_rl.types import Version, WeightKind

log = structlog.get_logger()


async def tidy(ledger: Ledger, versions: Path) -> None:
    """Delete folders that no version names and no live lease may commit, and record pruned optimizer states.

    Call it before the first lease.
    """
    folders = await ledger.version_folders()
    removed = await asyncio.to_thread(remove_unnamed, versions, folders.values(), await ledger.live_lease())
    if removed:
        log.warning("version_folders_removed", folders=removed, why="incomplete, or whole and never committed")
    for weight_version in await asyncio.to_thread(without_optimizer, versions.parent, folders):
        await ledger.optimizer_pruned(weight_version)


async def refuse_other_form(ledger: Ledger, root: Path, trainer: TrainerSettings) -> None:
    """Check that the settings describe the adapters that are stored. Raises SettingsError, in the settings' terms.

    Looked at are the version that training continues from, and the one that should serve, of each policy.
    """
    folders = await ledger.version_folders()
    numbers = await ledger.tips_and_targets()
    for number in sorted(numbers & folders.keys(), reverse=True):
        folder = folders[number]
        if conflicts := await asyncio.to_thread(lambda: list(checkpoint.adapter_conflicts(root / folder, trainer))):  # noqa: B023 (awaited here)
            raise SettingsError(
                f"version {number} of this data folder would mean something else: {'; '.join(conflicts)}. Set what it "
                "was made with, or start with another data_dir, or roll back to 0 first"
            )


async def remove_ended(ledger: Ledger, versions: Path) -> None:
    """Delete whole checkpoints that were never committed and no longer can be. Safe while trainers run.

    A folder that is being written (`.tmp-…`) is left to its trainer, or to the next start.
    """
    there = await asyncio.to_thread(lambda: {folder.name for folder in versions.glob("[!.]*")})
    named, live = (
        (await ledger.version_folders()).values(),
        await ledger.live_lease(),
    )  # asked after the listing, so that no new folder is deleted
    removed = await asyncio.to_thread(remove_unnamed, versions, named, live, among=there)
    if removed:
        log.info("version_folders_removed", folders=removed, why="whole, and never to be committed")


async def prune(ledger: Ledger, root: Path, *, newest: int, in_use: Collection[int]) -> list[int]:
    """Delete folders of versions neither needed (`ledger.needed_versions`) nor in use. Return the versions."""
    kept = await ledger.needed_versions(newest)
    gone = []
    for number in await ledger.version_folders():
        if number in kept or number in in_use:
            continue
        try:
            folder = await ledger.prune_weights(number, newest)
        except LedgerError:  # a rollback or a pin came in between
            continue
        if folder is not None:
            await asyncio.to_thread(checkpoint.discard, root / folder)
        gone.append(number)
    return gone


def remove_unnamed(
    versions: Path, named: Iterable[str], live_lease: str | None, *, among: Collection[str] | None = None
) -> list[str]:
    """Delete the folders that are not in `named` and not the live lease's. Return their names.

    named: folders relative to the data directory, the parent of `versions`. among: delete no folder outside these.
    """
    kept = {parts[1] for parts in (PurePosixPath(folder).parts for folder in named) if parts[:1] == (versions.name,)}
    removed = []
    for folder in sorted(versions.iterdir()):
        is_known = folder.name in kept or (live_lease is not None and live_lease in folder.name)
        is_known = is_known or (among is not None and folder.name not in among)
        if is_known or folder.is_symlink() or not folder.is_dir():
            continue
        checkpoint.discard(folder)
        if folder.exists():
            log.warning("version_folder_stays", folder=folder.name)
        else:
            removed.append(folder.name)
    return removed


def without_optimizer(root: Path, folders: Mapping[int, str]) -> list[int]:
    """Return the versions whose optimizer state was written with the checkpoint and is gone."""
    return [version for version, folder in folders.items() if checkpoint.is_pruned(root / folder)]


def is_remote_only(version: Version) -> bool:
    """Return True if the version is on no disk, so that only its trainer has it."""
    return version.kind is WeightKind.FULL and not version.durable


def weights_of(version: Version, data_dir: Path, base_folder: Path | None) -> Path:
    """Return the folder of full weights. Raises EngineRefused when the server has none."""
    if is_remote_only(version):
        raise EngineRefused(f"only its trainer has the weights of version {version.weight_version}", status=400)
    if version.folder is not None:
        return data_dir / version.folder
    if version.weights_file is not None:
        raise EngineRefused(f"the weights of version {version.weight_version} were deleted", status=400)
    if base_folder is None:
        raise EngineRefused("the folder of the base's weights is not known to the server", status=400)
    return base_folder


_BLOCK = 1 << 22
_EXPONENT: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "C64": ("<u4", 0x7F80_0000),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
}
"""Integer type and the bits that are all set in NaN and infinity.

F8_E4M3 has no infinity, and one NaN of each sign.
"""


def not_finite(folder: Path) -> str | None:
    """Name the first tensor that holds NaN or infinity; None if all are finite. Blocks: call it in a thread."""
    for file in sorted(folder.rglob("*.safetensors")):
        with suppress(OSError):  # of this file: the next is still read
            if (name := _first_in(file)) is not None:
                return f"{file.relative_to(folder).as_posix()}: {name} holds what is not a finite number"
    return None


def _first_in(file: Path) -> str | None:
    with file.open("rb") as stream:
        for name, dtype, begin, end in _tensors(stream, file.stat().st_size):
            kind, bits = _EXPONENT[dtype]
            stream.seek(begin)
            for at in range(begin, end, _BLOCK):
                block = stream.read(min(_BLOCK, end - at))
                values = np.frombuffer(block[: len(block) - len(block) % np.dtype(kind).itemsize], kind)
                if bool(((values & bits) == bits).any()):
                    return name
    return None


def _tensors(stream: BinaryIO, file_size: int) -> Iterator[tuple[str, str, int, int]]:
    """Yield (name, dtype, first byte, end) of the floating-point tensors, in file order; no tensor of a bad header."""
    size = int.from_bytes(stream.read(8), "little")
    if size > file_size - 8:
        return
    try:
        header = json.loads(stream.read(size))
    except (ValueError, RecursionError):
        return
    found = []
    for name, entry in header.items() if isinstance(header, dict) else ():
        match entry:
            case {"dtype": str(dtype), "data_offsets": [int(begin), int(end)]} if dtype in _EXPONENT:
                if 0 <= begin <= end <= file_size - 8 - size:
                    found.append((8 + size + begin, 8 + size + end, dtype, name))
    for begin, end, dtype, name in sorted(found):
        yield name, dtype, begin, end

"""Identity of a model's weights: sha256 over names, types, shapes and bytes of its safetensors, without torch."""

import hashlib
import json
from pathlib import Path

from openclaw_rl.errors import SettingsError

_BLOCK = 1 << 22


def hash_tensors(folder: Path) -> str:
    """Hash the folder's tensors in the order of their names, independent of their division into files."""
    where: dict[str, tuple[Path, str, list[int], int, int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                where[name] = (file, entry["dtype"], entry["shape"], 8 + size + begin, end - begin)
    if not where:
        raise SettingsError(f"{folder} holds no safetensors")
    digest = hashlib.sha256()
    for name in sorted(where):
        file, dtype, shape, offset, length = where[name]
        digest.update(json.dumps([name, dtype, shape]).encode())
        with file.open("rb") as stream:
            stream.seek(offset)
            while length > 0:
                block = stream.read(min(length, _BLOCK))
                if not block:
                    raise SettingsError(f"{file} is cut short")
                digest.update(block)
                length -= len(block)
    return digest.hexdigest()

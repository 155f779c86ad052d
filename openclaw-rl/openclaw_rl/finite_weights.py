"""Whether every weight of a version is a number, read from its files without torch.

Looks at the *.safetensors of a folder, an adapter's EMA teacher below it included, and tells NaN and infinity by the
exponent bits, so that bfloat16 and fp8, which numpy does not know, need no conversion. Integers are always numbers.
Memory: one block, whatever the file.

Leaves to others: a file that cannot be read, is no safetensors, or is cut short (the engine refuses it when it loads),
and numbers that are finite and useless (the gate).
"""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np

_BLOCK = 1 << 22
_EXPONENT: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
}
"""The bits that are all set in what is no finite number. F8_E4M3 has no infinity, and one NaN of each sign."""


def not_finite(folder: Path) -> str | None:
    """The first tensor that holds NaN or infinity, in words; None when all are finite. Blocks: call it in a thread."""
    with suppress(OSError):
        for file in sorted(folder.rglob("*.safetensors")):
            if (name := _first_in(file)) is not None:
                return f"{file.relative_to(folder).as_posix()}: {name} holds what is not a finite number"
    return None


def _first_in(file: Path) -> str | None:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > file.stat().st_size:
            return None
        try:
            header = json.loads(stream.read(size))
            tensors = sorted(
                (entry["data_offsets"][0], entry["data_offsets"][1], entry["dtype"], name)
                for name, entry in header.items()
                if name != "__metadata__"
            )
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            return None
        for begin, end, dtype, name in tensors:
            if dtype not in _EXPONENT:
                continue
            kind, bits = _EXPONENT[dtype]
            stream.seek(8 + size + begin)
            for at in range(begin, end, _BLOCK):
                block = stream.read(min(_BLOCK, end - at))
                values = np.frombuffer(block[: len(block) - len(block) % np.dtype(kind).itemsize], kind)
                if bool(((values & bits) == bits).any()):
                    return str(name)
    return None

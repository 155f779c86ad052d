"""Whether every weight of a version is a number, read from its files without torch.

Looks at the *.safetensors of a folder, an adapter's EMA teacher below it included, and tells NaN and infinity by the
exponent bits, so that bfloat16 and fp8, which numpy does not know, need no conversion. Integers are always numbers.
Memory: one block, whatever the file.

Raises nothing, whatever a file holds. Leaves to others: a file that cannot be read, is no safetensors, or is cut short
(the engine refuses it when it loads), dtypes that no trainer of ours writes (the FNUZ forms of fp8), and numbers that
are finite and useless (the gate).
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

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
"""The bits that are all set in what is no finite number. F8_E4M3 has no infinity, and one NaN of each sign."""


def not_finite(folder: Path) -> str | None:
    """The first tensor that holds NaN or infinity, in words; None when all are finite. Blocks: call it in a thread."""
    for file in sorted(folder.rglob("*.safetensors")):
        with suppress(OSError):  # of this file: the next is looked at all the same
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
    """(name, dtype, first byte, end) of the tensors to look at, as they lie in the file; none where the header is not
    one."""
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

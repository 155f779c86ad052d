"""How token data lies in the ledger: small, exact, the same on every machine.

Ids are uint16 where they fit, else uint32; log-probs float32 (what engines send); masks one bit a token, NULL when all
are True; versions run lengths. Little-endian throughout. The first byte of a blob of ids or of a piece says how the
rest is packed.
"""

import struct
import zlib
from collections.abc import Sequence

from openclaw_rl.types import Ids, LogProbs, VersionRun

_RAW, _ZLIB = 0, 1
_U16, _U32 = 2, 4


def pack_bytes(data: bytes) -> bytes:
    """Compressed where that is shorter."""
    if len(data) > 96:
        short = zlib.compress(data, 6)
        if len(short) < len(data):
            return bytes((_ZLIB,)) + short
    return bytes((_RAW,)) + data


def unpack_bytes(blob: bytes) -> bytes:
    return zlib.decompress(blob[1:]) if blob[0] == _ZLIB else blob[1:]


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids, or row ids of pieces."""
    if not ids:
        return b""
    try:
        return struct.pack(f"<B{len(ids)}H", _U16, *ids)
    except struct.error:  # an id beyond 16 bits; to look for one first would cost as much as to pack
        return struct.pack(f"<B{len(ids)}I", _U32, *ids)


def unpack_ids(blob: bytes) -> Ids:
    if not blob:
        return ()
    letter = "H" if blob[0] == _U16 else "I"
    return struct.unpack(f"<{(len(blob) - 1) // blob[0]}{letter}", blob[1:])


def pack_floats(values: LogProbs) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def unpack_floats(blob: bytes) -> LogProbs:
    return struct.unpack(f"<{len(blob) // 4}f", blob)


def pack_mask(mask: tuple[bool, ...]) -> bytes | None:
    if all(mask):
        return None
    bits = sum(1 << position for position, bit in enumerate(mask) if bit)
    return bits.to_bytes((len(mask) + 7) // 8, "little")


def unpack_mask(blob: bytes | None, length: int) -> tuple[bool, ...]:
    if blob is None:
        return (True,) * length
    bits = int.from_bytes(blob, "little")
    return tuple(bool(bits >> position & 1) for position in range(length))


def pack_runs(runs: tuple[VersionRun, ...]) -> bytes:
    return struct.pack(f"<{2 * len(runs)}I", *(number for run in runs for number in (run.weight_version, run.length)))


def unpack_runs(blob: bytes) -> tuple[VersionRun, ...]:
    return tuple(VersionRun(version, length) for version, length in struct.iter_unpack("<2I", blob))

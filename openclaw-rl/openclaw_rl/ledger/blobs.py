"""Content-addressed store of the ledger, and the binary format of token data.

Contents that many turns share are stored once, as a piece. A piece has a 16-byte BLAKE2b digest of its kind and
content, and a small integer as its name. A turn of a long conversation adds its new contents and four bytes for each
old message. A prompt is cut every `PROMPT_PIECE` tokens from its start: prompts that share a prefix share its pieces.

Token data is small, exact, and the same on every machine. Ids are uint16 if they fit, else uint32. Log-probs are
float32 (the engines' precision). Masks have one bit a token and are NULL if all are True. Versions are run lengths. All
numbers are little-endian. The first byte of a blob of ids, or of a piece, names the packing of the rest.
"""

import sqlite3
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import orjson
from pydantic import ValidationError

from openclaw_rl.ledger.schema import cut, in_list
from openclaw_rl.messages import Message
from openclaw_rl.types import Ids, LogProbs, VersionRun

if TYPE_CHECKING:
    from openclaw_rl.ledger.pictures import Staged

_RAW, _ZLIB = 0, 1
_U16, _U32 = 2, 4
PROMPT_PIECE = 512
"""Tokens of one piece of a prompt."""


def pack_bytes(data: bytes) -> bytes:
    """Compress the data if that makes it shorter."""
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


@dataclass(slots=True)
class Watch:
    """Old pieces that rows came to refer to since a deletion began. The deletion ends it from its own thread."""

    touched: set[int] = field(default_factory=set)
    is_over: bool = False


class Connection(sqlite3.Connection):
    """Connection of the ledger. During a deletion it notes the old pieces that rows come to refer to."""

    watch: Watch | None = None
    staged: "Staged | None" = None
    """Pictures that are on disk for rows that come."""


def touch(db: sqlite3.Connection, ids: Iterable[int]) -> None:
    """Note that a row refers to these pieces from now on."""
    if not isinstance(db, Connection) or (watch := db.watch) is None:
        return
    if watch.is_over:
        db.watch = None
    else:
        watch.touched.update(ids)


Piece = tuple[bytes, bytes]
"""Kind and content."""


def put(db: sqlite3.Connection, pieces: Sequence[Piece]) -> list[int]:
    """Store the pieces that are new, whatever their kinds; return the ids of all, in order."""
    digests = [blake2b(content, digest_size=16, person=kind).digest() for kind, content in pieces]
    ids: dict[bytes, int] = {}
    wanted = list(dict.fromkeys(digests))
    for some in cut(wanted):
        marks, values = in_list(some)
        ids.update(db.execute(f"SELECT digest, id FROM piece WHERE digest IN ({marks})", values))
    touch(db, ids.values())
    for digest, (_, content) in zip(digests, pieces, strict=True):
        if digest not in ids:
            row = db.execute("INSERT INTO piece (digest, data) VALUES (?, ?)", (digest, pack_bytes(content)))
            ids[digest] = row.lastrowid or 0
    return [ids[digest] for digest in digests]


def get(db: sqlite3.Connection, ids: Iterable[int]) -> list[bytes]:
    """Return the contents of these ids, in order."""
    wanted = list(ids)
    found: dict[int, bytes] = {}
    distinct = list(dict.fromkeys(wanted))
    for some in cut(distinct):
        marks, values = in_list(some)
        found.update(db.execute(f"SELECT id, data FROM piece WHERE id IN ({marks})", values))
    return [unpack_bytes(found[piece]) for piece in wanted]


def put_text(db: sqlite3.Connection, text: str | None) -> int | None:
    return None if text is None else put(db, [text_piece(text)])[0]


def text_piece(text: str) -> Piece:
    return b"text", text.encode()


def get_text(db: sqlite3.Connection, piece: int | None) -> str | None:
    return None if piece is None else get(db, [piece])[0].decode()


def put_messages(db: sqlite3.Connection, messages: Sequence[Message]) -> list[int]:
    return put(db, message_pieces(messages))


def message_pieces(messages: Sequence[Message]) -> list[Piece]:
    """Return messages without the fields that the client left out: a message read back equals the one stored."""
    return [(b"message", message.model_dump_json(exclude_unset=True).encode()) for message in messages]


def get_messages(db: sqlite3.Connection, ids: Sequence[int]) -> tuple[Message, ...]:
    return tuple(map(_message, get(db, ids)))


def _message(content: bytes) -> Message:
    try:
        return Message.model_validate_json(content)
    except ValidationError:
        # Written before requests had a limit of depth: the writer takes 254 levels, and this reader 200.
        return Message.model_validate(orjson.loads(content))


def put_prompt(db: sqlite3.Connection, prompt: Ids) -> bytes:
    return pack_ids(put(db, prompt_pieces(prompt)))


def prompt_pieces(prompt: Ids) -> list[Piece]:
    return [
        (b"prompt", pack_ids(prompt[start : start + PROMPT_PIECE])) for start in range(0, len(prompt), PROMPT_PIECE)
    ]


def get_prompt(db: sqlite3.Connection, blob: bytes) -> Ids:
    prompt: list[int] = []
    for content in get(db, unpack_ids(blob)):
        prompt.extend(unpack_ids(content))
    return tuple(prompt)

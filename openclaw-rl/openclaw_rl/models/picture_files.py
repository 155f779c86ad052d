"""Files of pictures: their size, read from headers alone, and their pixels.

A small file can ask for much memory or time: a size of a billion pixels, scans without an end, a million empty chunks.
`size_of` reads the headers in a bounded number of steps, before a decoder asks for memory. A file that passes costs a
decoder no more than its pixels. `check` and `as_png` then read the pixels; they block, and let other threads run.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_CHUNKS = 20_000
"""Chunks of a PNG. A decoder handles each by itself; writers make one for some kilobytes."""
MOST_SEGMENTS = 1000
"""Segments and fill bytes of a JPEG before its pixels."""
MOST_SCANS = 32
"""Passes of a JPEG over its pixels. Writers of progressive files make about ten."""
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
_NO_PICTURE = "the picture is no PNG, JPEG or WebP that can be read"
_FRAMES = "the picture has more than one frame"
_DEEP = "a grey picture of 16 bits is read as white by every decoder here: send it in 8 bits"
_SIZE_OF_JPEG = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class PictureFault(ValueError):
    """The file cannot be taken; the message says why, for the caller that sent it."""


def is_jpeg(data: bytes) -> bool:
    return data.startswith(_JPEG)


def size_of(data: bytes) -> tuple[int, int]:
    """Return width and height as the headers say. Raises PictureFault; a file that passes may still be broken."""
    try:
        if data.startswith(_PNG):
            size = _size_of_png(data)
        elif is_jpeg(data):
            size = _size_of_jpeg(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            size = _size_of_webp(data)
        else:
            raise PictureFault(_NO_PICTURE)
    except IndexError as error:
        raise PictureFault(_NO_PICTURE) from error
    if min(size) < 1:
        raise PictureFault(_NO_PICTURE)
    return size


def check(data: bytes, size: tuple[int, int]) -> None:
    """Read all pixels of a file whose headers say `size`. Raises PictureFault."""
    with _faults():
        _pixels(data, size)


def as_png(data: bytes, size: tuple[int, int]) -> bytes:
    """Return the same pixels as a PNG, and nothing else of the file. Raises PictureFault."""
    with _faults():
        return _png(_pixels(data, size))


def scaled(data: bytes, size: tuple[int, int], most_pixels: int) -> tuple[bytes, tuple[int, int]]:
    """Return a picture of about so many pixels as a PNG, and its size. Raises PictureFault."""
    from PIL import Image

    shrink = math.sqrt(most_pixels / (size[0] * size[1]))
    # Rounded so that no picture becomes narrower than it is: models refuse those that are too narrow.
    width, height = (size[at] * shrink for at in (0, 1))
    smaller = (int(width), math.ceil(height)) if width > height else (math.ceil(width), int(height))
    with _faults():
        return _png(_pixels(data, size).resize(smaller, Image.Resampling.BICUBIC)), smaller


def _pixels(data: bytes, size: tuple[int, int]) -> "Image":
    """Return the first frame in RGB, as engines and the trainer read it: no turn that EXIF asks for is made."""
    from PIL import Image  # at the first picture: most servers never see one

    with Image.open(BytesIO(data), formats=FORMATS) as image:
        if image.size != size:
            raise PictureFault(_NO_PICTURE)
        # Phones write a JPEG with a smaller copy behind it (MPO): the first frame is the picture.
        if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
            raise PictureFault(_FRAMES)
        if image.mode.startswith("I"):
            raise PictureFault(_DEEP)
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")


def _png(pixels: "Image") -> bytes:
    out = BytesIO()
    pixels.info.clear()  # colour profiles and the like would go along
    pixels.save(out, "PNG", compress_level=1)
    return out.getvalue()


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except PictureFault:
        raise
    except Exception as error:  # Pillow's plug-ins raise what they meet in a broken file, struct.error too
        raise PictureFault(_NO_PICTURE) from error


def _size_of_png(data: bytes) -> tuple[int, int]:
    at, size = len(_PNG), None
    for _ in range(MOST_CHUNKS):
        length, kind = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        if size is None:
            if kind != b"IHDR" or length != 13:
                raise PictureFault(_NO_PICTURE)
            size = int.from_bytes(data[at + 8 : at + 12]), int.from_bytes(data[at + 12 : at + 16])
        if kind == b"acTL" and int.from_bytes(data[at + 8 : at + 12]) > 1:
            raise PictureFault(_FRAMES)
        if kind == b"IEND":
            return size
        at += 12 + length
        if at >= len(data):
            raise PictureFault("the picture's file is cut off")
    raise PictureFault(f"the PNG has more than {MOST_CHUNKS} chunks")


def _size_of_jpeg(data: bytes) -> tuple[int, int]:
    # In the data of a scan each 0xFF has a 0x00 behind it, so that these two bytes are a scan's beginning, or of a
    # copy in a header.
    if data.count(b"\xff\xda") > MOST_SCANS:
        raise PictureFault(f"the JPEG has more than {MOST_SCANS} scans: send it as a PNG")
    at, size = 2, None
    for _ in range(MOST_SEGMENTS):
        if data[at] != 0xFF:
            raise PictureFault(_NO_PICTURE)
        if (kind := data[at + 1]) in (0x00, 0xFF):  # fill bytes
            at += 1
            continue
        if kind == 0x01 or 0xD0 <= kind <= 0xD9:  # markers alone
            at += 2
            continue
        if kind == 0xDA:
            if size is None:
                raise PictureFault(_NO_PICTURE)
            return size
        if kind in _SIZE_OF_JPEG:
            size = int.from_bytes(data[at + 7 : at + 9]), int.from_bytes(data[at + 5 : at + 7])
        at += 2 + max(2, int.from_bytes(data[at + 2 : at + 4]))
    raise PictureFault(f"the JPEG has more than {MOST_SEGMENTS} segments before its pixels")


def _size_of_webp(data: bytes) -> tuple[int, int]:
    match data[12:16]:
        case b"VP8X":
            if data[20] & 0x02:
                raise PictureFault(_FRAMES)
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        case b"VP8L" if data[20] == 0x2F:
            bits = int.from_bytes(data[21:25], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            sides = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
            return next(sides), next(sides)
    raise PictureFault(_NO_PICTURE)

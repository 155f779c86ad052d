"""Headers of pictures in a bounded number of steps, and files that ask for more than they are."""

import io
import struct
import zlib

import pytest
from pictures import picture_file
from PIL import Image

from openclaw_rl.models.picture_files import (
    MOST_CHUNKS,
    MOST_SCANS,
    MOST_SEGMENTS,
    PictureFault,
    as_png,
    check,
    scaled,
    size_of,
)


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *more: bytes) -> bytes:
    """Return the headers of a PNG of this size, without pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IEND")


def webp(kind: bytes, data: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def extended(width: int, height: int, *, flags: int = 0) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return webp(b"VP8X", bytes((flags, 0, 0, 0)) + sides)


def with_segments(jpeg: bytes, *segments: bytes) -> bytes:
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {"quality": 50}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0" + b"II*\0\x08\0\0\0\0\0"}),
    ],
)
def test_the_headers_say_what_the_decoder_says(form, options) -> None:
    for size in ((1, 1), (33, 17), (300, 2)):
        data = picture_file(*size, form=form, **options)
        assert size_of(data) == size
        check(data, size)
        lossless = as_png(data, size)
        assert lossless.startswith(b"\x89PNG")
        assert Image.open(io.BytesIO(lossless)).tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (png(100_000, 100_000), (100_000, 100_000)),
        (extended(16_777_216, 256), (16_777_216, 256)),
        (webp(b"VP8L", b"\x2f" + (0x0FFFFFFF).to_bytes(4, "little")), (16384, 16384)),
        (webp(b"VP8 ", bytes(3) + b"\x9d\x01\x2a" + b"\xff\x3f\xff\x3f"), (16383, 16383)),
    ],
)
def test_a_huge_size_is_known_without_a_decoder(monkeypatch, data, size) -> None:
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    assert size_of(data) == size


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no PNG, JPEG or WebP"),
        (b"GIF89a" + bytes(20), "no PNG, JPEG or WebP"),
        (b"\x89PNG\r\n\x1a\n", "no PNG, JPEG or WebP"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IDAT"), "no PNG, JPEG or WebP"),
        (png(0, 5), "no PNG, JPEG or WebP"),
        (png(5, 5)[:-12], "cut off"),
        (png(5, 5, chunk(b"acTL", struct.pack(">II", 2, 0))), "more than one frame"),
        (png(5, 5, *[chunk(b"tEXt")] * MOST_CHUNKS), f"more than {MOST_CHUNKS} chunks"),
        (b"\xff\xd8", "no PNG, JPEG or WebP"),
        (b"\xff\xd8\xff\xda", "no PNG, JPEG or WebP"),
        (b"\xff\xd8" + b"\xff" * 10_000, f"more than {MOST_SEGMENTS} segments"),
        (with_segments(picture_file(form="JPEG"), *[b"\xff\xfe\x00\x02"] * MOST_SEGMENTS), "segments before"),
        (with_segments(picture_file(form="JPEG"), b"junk"), "no PNG, JPEG or WebP"),
        (picture_file(form="JPEG") + b"\xff\xda" * MOST_SCANS, f"more than {MOST_SCANS} scans"),
        (extended(5, 5, flags=2), "more than one frame"),
        (webp(b"ANIM", bytes(20)), "no PNG, JPEG or WebP"),
        (b"RIFF\0\0\0\0WEBPVP8X", "no PNG, JPEG or WebP"),
    ],
)
def test_headers_that_are_refused(data, says) -> None:
    with pytest.raises(PictureFault, match=says):
        size_of(data)


def test_a_cut_file_is_a_fault_at_the_headers_or_at_the_pixels() -> None:
    for form in ("PNG", "JPEG", "WEBP"):
        data = picture_file(form=form)
        for end in range(len(data) - 20):
            with pytest.raises(PictureFault):
                check(data[:end], size_of(data[:end]))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_pixels_that_are_missing_or_of_another_size(form) -> None:
    data = picture_file(64, 64, form=form, shade=5)
    with pytest.raises(PictureFault, match="that can be read"):
        check(data[: len(data) // 2], (64, 64))
    with pytest.raises(PictureFault, match="that can be read"):
        check(data, (64, 63))


@pytest.mark.parametrize("size", [(2000, 10), (10, 2000), (1, 200), (60, 60)])
def test_a_smaller_picture_is_no_narrower(size) -> None:
    data, smaller = scaled(picture_file(*size), size, 100)
    assert size_of(data) == smaller
    assert max(smaller) / min(smaller) <= max(size) / min(size)
    assert smaller[0] * smaller[1] <= 100 + max(smaller)
    with pytest.raises(PictureFault):
        scaled(data, (size[0] + 1, size[1]), 10)


def test_a_jpeg_of_the_most_scans_that_writers_make_is_taken() -> None:
    data = picture_file(64, 48, form="JPEG", progressive=True, quality=95)
    assert 5 < data.count(b"\xff\xda") < MOST_SCANS
    assert size_of(data) == (64, 48)

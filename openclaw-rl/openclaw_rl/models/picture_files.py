"""Files of pictures: their size, read from headers alone, their pixels, and the memory that all of them share.

A small file can ask for much memory or time: a size of a billion pixels, scans without an end, a million empty chunks.
`size_of` reads the headers in a bounded number of steps, before a decoder asks for memory. A file that passes costs a
decoder no more than its pixels. `check` and `as_png` then read the pixels; they block, and let other threads run.

`PictureMemory` is one budget of bytes over all requests (`pictures.memory_mb`), for their files and for the pixels that
a few threads decode. What the largest picture needs to be decoded is kept free of files. So work waits for no file, and
files wait for work alone: no two requests can wait for each other. Turns come in the order of the calls. Files that
wait for their turn stand in a line, which has as many bytes again at most.
"""

import asyncio
import math
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from openclaw_rl.errors import RequestError
from openclaw_rl.settings import PictureSettings

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_CHUNKS = 20_000
"""Chunks of a PNG. A decoder handles each by itself; writers make one for some kilobytes."""
MOST_SEGMENTS = 1000
"""Segments and fill bytes of a JPEG before its pixels."""
MOST_SCANS = 32
"""Passes of a JPEG over its pixels. Writers of progressive files make about ten."""
AT_ONCE = 2
"""Pictures that are decoded at once, of all requests: the cores serve chats."""
_KEPT_SHARE = 4
"""One part in so many of the bytes of files is for `Kept`."""
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


class _Turn(NamedTuple):
    size: int
    come: "asyncio.Future[None]"


class Work:
    """The memory of one picture while a thread works on it."""

    def __init__(self, memory: "PictureMemory", size: int) -> None:
        self._memory, self._size = memory, size
        self._job: Future[Any] | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on one of the threads, in the order of the calls."""
        self._job = job = self._memory.submit(work)
        return await asyncio.wrap_future(job)

    def shrink(self, size: int) -> None:
        """Give back all but `size` bytes: the pixels are gone."""
        given, self._size = max(0, self._size - size), min(size, self._size)
        self._memory.give_back(work=given)

    def end(self) -> None:
        """Give back what is left: when the thread is done, which may be after its request has been given up."""
        give_back, size = self._memory.give_back, self._size
        if self._job is None or self._job.done():
            give_back(work=size)
        else:
            loop = asyncio.get_running_loop()
            self._job.add_done_callback(lambda _: _soon(loop, partial(give_back, work=size)))


class Kept:
    """Bytes that are kept for another use while somebody refers to this object."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


class PictureMemory:
    """The budget, its lines, and the threads. All calls come from one event loop; `Kept` may end on any thread."""

    def __init__(self, settings: PictureSettings) -> None:
        self._settings = settings
        self.most = int(settings.memory_mb * 2**20)
        self._largest_work = settings.work_bytes(settings.max_pixels)
        self.most_files = self.most - self._largest_work
        """Bytes of the files of all requests that run."""
        self._files = self._work = self._in_line = self._kept = 0
        self._files_line: deque[_Turn] = deque()
        self._work_line: deque[_Turn] = deque()
        # Threads of their own: a thread goes on when its request has been given up, and still counts.
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pictures")

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` on one of the threads, in the order of the calls. A cancelled call refers to it no longer."""
        box = [work]
        job = self._threads.submit(lambda: box.pop()())
        job.add_done_callback(lambda _: box.clear())
        return job

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` on one of the threads, without memory of its own."""
        return await asyncio.wrap_future(self.submit(work))

    def join_line(self, size: int) -> None:
        """Count the bytes of a request that waits. Raises RequestError (503) if the line is full."""
        if self._in_line and self._in_line + size > self.most:
            raise RequestError(
                "other requests' pictures wait for the memory of pictures.memory_mb; try again",
                status=503,
                code="overloaded",
            )
        self._in_line += size

    def leave_line(self, size: int) -> None:
        self._in_line -= size

    async def take(self, size: int) -> None:
        """Wait until a request may hold so many bytes of files; `give_back` ends it. Raises RequestError (413)."""
        if size > self.most_files:
            most = f"{self.most_files / 2**20:.3g} MB that pictures.memory_mb leaves for the files of all requests"
            raise RequestError(
                f"the pictures of this request have {size / 2**20:.3g} MB, more than the {most}",
                status=413,
                code="request_too_large",
            )
        await self._turn(self._files_line, size)

    def give_back(self, *, files: int = 0, work: int = 0) -> None:
        self._files, self._work = self._files - files, self._work - work
        self._grant()

    @asynccontextmanager
    async def work(self, pixels: int) -> AsyncIterator[Work]:
        """Wait for the memory that work on a picture of so many pixels needs, and have it for the time of the block."""
        # A picture of an older setting may be larger: it gets all that there is for one.
        size = min(self._settings.work_bytes(pixels), self._largest_work)
        await self._turn(self._work_line, size)
        work = Work(self, size)
        try:
            yield work
        finally:
            work.end()

    def keep(self, data: bytes) -> Kept | None:
        """Return the data, counted for as long as the result is referred to; None if there is no room now."""
        size = len(data)
        if self._kept + size > self.most_files // _KEPT_SHARE or not self._has_room(files=size):
            return None
        self._kept, self._files = self._kept + size, self._files + size
        kept, loop = Kept(data), asyncio.get_running_loop()
        weakref.finalize(kept, _soon, loop, partial(self._let_go, size)).atexit = False
        return kept

    def _let_go(self, size: int) -> None:
        self._kept -= size
        self.give_back(files=size)

    async def _turn(self, line: deque[_Turn], size: int) -> None:
        turn = _Turn(size, asyncio.get_running_loop().create_future())
        line.append(turn)
        self._grant()
        try:
            await turn.come
        except BaseException:
            if turn.come.cancelled():
                line.remove(turn)
                self._grant()  # it may have been the first
            elif line is self._files_line:  # its turn came in the same moment
                self.give_back(files=size)
            else:
                self.give_back(work=size)
            raise

    def _grant(self) -> None:
        """Give turns to those who wait, in their order."""
        # One that was cancelled leaves its line in a moment, and calls here again.
        while (turn := _first(self._work_line)) and self._has_room(work=turn.size):
            self._work += self._work_line.popleft().size
            turn.come.set_result(None)
        while (turn := _first(self._files_line)) and self._has_room(files=turn.size):
            self._files += self._files_line.popleft().size
            turn.come.set_result(None)

    def _has_room(self, *, files: int = 0, work: int = 0) -> bool:
        if files and self._files + files > self.most_files:
            return False
        return self._files + files + self._work + work <= self.most


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call on the event loop, from any thread."""
    with suppress(RuntimeError):  # it is closed, and the budget with it
        loop.call_soon_threadsafe(call)


def _first(line: deque[_Turn]) -> _Turn | None:
    """Return the first who waits; None without one, or if it was cancelled."""
    return line[0] if line and not line[0].come.done() else None

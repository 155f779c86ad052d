"""The memory of pictures: one budget of bytes over all requests, its lines, and the threads that decode.

`PictureMemory` counts (`pictures.memory_mb`) the requests' files and the pixels that a few threads decode. What the
largest picture needs to be decoded is kept free of files. So work waits for no file, and files wait for work alone: no
two requests can wait for each other. Turns come in the order of the calls. Files that wait for their turn stand in a
line, which has as many bytes again at most.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from openclaw_rl.errors import RequestError
from openclaw_rl.settings import PictureSettings

T = TypeVar("T")

AT_ONCE = 2
"""Pictures that are decoded at once, of all requests: the cores serve chats."""
_KEPT_SHARE = 4
"""One part in so many of the bytes of files is for `Kept`."""


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

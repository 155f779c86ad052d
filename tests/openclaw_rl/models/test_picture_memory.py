"""The budget of all pictures: turns in order, work that never waits for files, and bytes that come back."""

import asyncio
import gc
import threading

import pytest

from openclaw_rl.errors import RequestError
from openclaw_rl.models.picture_memory import AT_ONCE, PictureMemory
from openclaw_rl.settings import PictureSettings

PIXELS = 2**16


@pytest.fixture
def memory() -> PictureMemory:
    """Room for eight files of 1 MB beside the work on one picture."""
    settings = PictureSettings(max_pixels=PIXELS)
    work = settings.work_bytes(PIXELS)
    return PictureMemory(PictureSettings(max_pixels=PIXELS, memory_mb=(8 * MB + work) / 2**20))


MB = 2**20


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def waiting(memory: PictureMemory, *sizes: int) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(memory.take(size)) for size in sizes]


async def test_turns_come_in_order_and_a_small_file_passes_no_large_one(memory) -> None:
    await memory.take(6 * MB)
    large, small = waiting(memory, 4 * MB, MB)
    await settled()
    assert not large.done()
    assert not small.done()
    memory.give_back(files=6 * MB)
    await asyncio.gather(large, small)
    memory.give_back(files=5 * MB)
    assert memory._files == 0


async def test_a_request_larger_than_all_is_refused_at_once_and_one_as_large_is_not(memory) -> None:
    with pytest.raises(RequestError, match="more than the 8 MB that pictures") as refused:
        await memory.take(8 * MB + 1)
    assert (refused.value.status, refused.value.code) == (413, "request_too_large")
    await memory.take(memory.most_files)


async def test_who_gives_up_lets_the_next_one_through(memory) -> None:
    await memory.take(6 * MB)
    first, second = waiting(memory, 4 * MB, MB)
    await settled()
    first.cancel()
    await second
    assert (memory._files, len(memory._files_line)) == (7 * MB, 0)


async def test_a_turn_that_comes_as_its_caller_gives_up_is_given_back(memory) -> None:
    await memory.take(8 * MB)
    (task,) = waiting(memory, 2 * MB)
    await settled()
    memory.give_back(files=8 * MB)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert memory._files == 0


async def test_work_waits_for_no_file_and_a_larger_picture_gets_all_there_is(memory) -> None:
    await memory.take(memory.most_files)
    async with memory.work(9 * PIXELS) as work:
        assert memory._files + memory._work == memory.most
        other = asyncio.create_task(one_work(memory))
        await settled()
        assert not other.done(), "the memory is full"
        work.shrink(1000)
        assert memory._work == 1000
    await other
    assert memory._work == 0


async def one_work(memory: PictureMemory) -> None:
    async with memory.work(PIXELS):
        pass


async def test_files_wait_for_work_alone_and_work_goes_first(memory) -> None:
    async with memory.work(PIXELS), memory.work(PIXELS):
        (task,) = waiting(memory, memory.most_files)
        await settled()
        assert not task.done()
    await task


async def test_a_thread_that_nobody_waits_for_still_counts(memory) -> None:
    go_on, runs = threading.Event(), threading.Event()

    def slow() -> None:
        runs.set()
        go_on.wait(30)

    async def work() -> None:
        async with memory.work(PIXELS) as one:
            await one.run(slow)

    task = asyncio.create_task(work())
    await asyncio.to_thread(runs.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert memory._work > 0
    go_on.set()
    while memory._work:
        await asyncio.sleep(0)


async def test_a_call_that_was_cancelled_before_its_thread_is_forgotten(memory) -> None:
    class Call:
        def __call__(self) -> None:
            pytest.fail("it ran")

    go_on = threading.Event()
    busy = [memory.submit(lambda: go_on.wait(30)) for _ in range(AT_ONCE)]
    job = memory.submit(Call())
    assert job.cancel()
    gc.collect()
    assert not any(isinstance(one, Call) for one in gc.get_objects())
    go_on.set()
    assert all(one.result() for one in busy)


async def test_the_line_has_a_limit_that_its_first_may_pass(memory) -> None:
    memory.join_line(memory.most + 1)
    with pytest.raises(RequestError, match="try again") as refused:
        memory.join_line(1)
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    memory.leave_line(memory.most + 1)
    memory.join_line(1)


async def test_what_is_kept_counts_until_nobody_refers_to_it(memory) -> None:
    kept = memory.keep(bytes(2 * MB))
    assert kept is not None
    assert memory._files == 2 * MB
    assert memory.keep(bytes(1)) is None, "a quarter at most"
    del kept
    while memory._files:
        await asyncio.sleep(0)
    await memory.take(memory.most_files)
    assert memory.keep(bytes(1)) is None, "there is no room"


def test_the_memory_must_hold_one_picture() -> None:
    with pytest.raises(ValueError, match=r"memory_mb: a picture of max_pixels \(8294400\) takes 191 MB"):
        PictureSettings(memory_mb=190)

"""Free pages go back to the system, although used pages between them stay."""

import asyncio
from pathlib import Path

from openclaw_rl.processes import malloc

_BUFFER, _COUNT = 16_000, 4000


def _resident_mb() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024


def _holes() -> list[bytearray]:
    """Free nine of ten buffers; the rest keep the C library from making its heap shorter."""
    buffers = [bytearray(b"x") * _BUFFER for _ in range(_COUNT)]
    return buffers[::10]


def test_what_is_free_goes_back() -> None:
    kept = _holes()
    before = _resident_mb()
    malloc.give_back()
    assert before - _resident_mb() > 0.5 * _BUFFER * _COUNT / 2**20
    assert all(buffer == bytearray(b"x") * _BUFFER for buffer in kept)


def test_free_memory_is_within_the_limit_of_the_control_group(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(malloc, "_GROUP", tmp_path)
    free = malloc.free_memory()
    assert free is not None
    assert free > 10_000
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.max").write_text("10000\n")
    assert malloc.free_memory() == 6000
    (tmp_path / "memory.max").write_text("max\n")
    assert malloc.free_memory() > 10_000


async def _falls() -> bool:
    """Make holes, and look whether they go back. They do not where that came before the first look at the memory."""
    kept = _holes()
    before = _resident_mb()
    for _ in range(200):
        await asyncio.sleep(0.01)
        if before - _resident_mb() > 0.5 * _BUFFER * _COUNT / 2**20:
            break
    else:
        return False
    return len(kept) == _COUNT // 10


async def test_it_does_so_again_and_again(monkeypatch) -> None:
    monkeypatch.setattr(malloc, "_EVERY_S", 0.01)
    task = asyncio.create_task(malloc.give_back_forever())
    for _ in range(2):
        async with asyncio.timeout(120):
            while not await _falls():
                pass
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()

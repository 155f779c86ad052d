"""Time and peak memory of a piece of work on a device, and the deadline of a run."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(slots=True)
class Reading:
    seconds: float = 0.0
    peak_gib: float | None = None


@contextmanager
def measured(device: str) -> Iterator[Reading]:
    """Measure the block: wall seconds until the device is done, and the peak memory of its allocator."""
    reading = Reading()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    yield reading
    if device == "cuda":
        torch.cuda.synchronize()
        reading.peak_gib = torch.cuda.max_memory_allocated() / GIB
    reading.seconds = time.perf_counter() - started


def best_of(times: int, device: str, work: Callable[[], object]) -> Reading:
    """Return the fastest of `times` runs after one to warm up."""
    work()
    readings = []
    for _ in range(times):
        with measured(device) as reading:
            work()
        readings.append(reading)
    return min(readings, key=lambda reading: reading.seconds)


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

"""How memory grows while a process lives: one slope over all lives, each with a level of its own.

Resident memory is what counts in the end, but an allocator keeps pages that are free inside, and grows for long before
it has enough of them. So the stub side's server also says what it holds: bytes of the C heap in use, objects of
Python's. Those level off sooner, when nothing leaks and what is kept has reached its bounds.
"""

import ctypes
import math
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path


def anonymous_mb(pid: int) -> float | None:
    """Private pages of the process, without those it maps from files; None when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(found[0]) / 1024 if found else None


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def tell_what_is_held(file: Path, every_s: float) -> None:
    """Write this process's own figures again and again, for `held`; for a thread. Returns where the C library is not
    glibc ≥ 2.33, which alone can say."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return
    mallinfo.restype = _MallInfo
    fresh = file.with_suffix(".new")
    while True:
        heap = mallinfo()
        fresh.write_text(f"{(heap.uordblks + heap.hblkhd) / 2**20:.3f} {sys.getallocatedblocks() / 1000:.3f}")
        fresh.replace(file)
        time.sleep(every_s)


def held(file: Path) -> dict[str, float]:
    """What a process last told; nothing when it has not."""
    try:
        heap_mb, objects = map(float, file.read_text().split())
    except OSError:
        return {}
    return {"MB of the C heap in use": heap_mb, "thousand Python objects": objects}


@dataclass(frozen=True, slots=True)
class Slope:
    """A minute, in the unit of the readings: MB resident, unless a name says another. `error` is its standard error.
    None where there is too little to say."""

    per_minute: float | None
    error: float | None
    lives: int
    minutes: float
    last: float


@dataclass(frozen=True, slots=True)
class Growth:
    """All lives pooled, and the second half of the longest life alone: what is still left of a curve that flattens."""

    pooled: Slope
    late: Slope


@dataclass(slots=True)
class Memory:
    """Readings by process name and pid."""

    warm_up_s: float
    _readings: dict[str, dict[int, list[tuple[float, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def read(self, name: str, pid: int | None) -> None:
        mb = None if pid is None else anonymous_mb(pid)
        if pid is not None and mb is not None:
            self._readings[name][pid].append((time.monotonic(), mb))

    def note(self, name: str, pid: int | None, value: float) -> None:
        """A reading of another kind, in its own unit."""
        if pid is not None:
            self._readings[name][pid].append((time.monotonic(), value))

    def write(self, file: Path) -> None:
        """Every reading, for whoever wants to look: process, pid, seconds since the first, MB."""
        rows = [
            (name, pid, at, mb)
            for name, lives in self._readings.items()
            for pid, life in lives.items()
            for at, mb in life
        ]
        begun = min((at for _, _, at, _ in rows), default=0.0)
        lines = [f'"{name}",{pid},{at - begun:.1f},{mb:.3f}' for name, pid, at, mb in rows]
        file.write_text("\n".join(["process,pid,s,mb", *lines]) + "\n")

    def growth(self) -> dict[str, Growth]:
        return {
            name: Growth(pooled([*lives.values()], self.warm_up_s), late([*lives.values()]))
            for name, lives in sorted(self._readings.items())
        }


def late(lives: list[list[tuple[float, float]]]) -> Slope:
    """The slope of the second half of the longest life."""
    longest = max(lives, key=lambda life: life[-1][0] - life[0][0])
    return pooled([longest], (longest[-1][0] - longest[0][0]) / 2)


def pooled(lives: list[list[tuple[float, float]]], warm_up_s: float) -> Slope:
    """Least squares over all lives: a common slope, an intercept for each. The first `warm_up_s` of a life are left
    out: that is when caches fill."""
    sxx = sxy = syy = 0.0
    count = used = 0
    minutes = 0.0
    for life in lives:
        kept = [(at / 60, mb) for at, mb in life if at >= life[0][0] + warm_up_s]
        if len(kept) < 3:
            continue
        mean_x, mean_y = (math.fsum(values) / len(kept) for values in zip(*kept, strict=True))
        sxx += math.fsum((x - mean_x) ** 2 for x, _ in kept)
        sxy += math.fsum((x - mean_x) * (y - mean_y) for x, y in kept)
        syy += math.fsum((y - mean_y) ** 2 for _, y in kept)
        count, used, minutes = count + len(kept), used + 1, minutes + kept[-1][0] - kept[0][0]
    last = max(((life[-1][0], life[-1][1]) for life in lives), default=(0.0, math.nan))[1]
    free = count - used - 1
    if not sxx or free < 1:
        return Slope(None, None, used, round(minutes, 2), last)
    slope = sxy / sxx
    error = math.sqrt(max(0.0, syy - slope * sxy) / free / sxx)
    return Slope(round(slope, 4), round(error, 4), used, round(minutes, 2), last)

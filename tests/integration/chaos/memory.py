"""How memory grows while a process lives: one slope over all lives, each with a level of its own.

Resident memory is what counts in the end, but an allocator keeps pages that are free inside, and grows for long before
it has enough of them. So the stub side's server also says what it holds: bytes of the C heap in use, objects of
Python's. Those level off sooner, when nothing leaks and what is kept has reached its bounds: a long life of that
server in which they climb is a finding (`Memory.findings`).
"""

import ctypes
import math
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

HEAP, OBJECTS = "MB of the C heap in use", "thousand Python objects"
MOST_PER_MINUTE = {HEAP: 0.3, OBJECTS: 4.0}
"""What a server may climb by: 0.3 kB and 4 objects a reply, at 900 replies a minute. Lives that were level had at most
0.1 and 2.7, the steepest that we saw 0.54 MB: the tokenizer library kept its words once for each thread that ever got a
long text (now `TokenizerThreads`, `memory.words`). Freed blocks that a thread of glibc keeps count as in use: 1.8 MB of
twelve threads, reached within minutes."""
FILLS_S, LEAST_MINUTES = 180.0, 8
"""When caches have filled, and how long a life must go on from there to be judged."""


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
    return {HEAP: heap_mb, OBJECTS: objects}


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
    """All lives pooled, and the second half of the longest life alone: what is still left of a curve that flattens.
    `climb` is that of the steepest long life; None where none was long."""

    pooled: Slope
    late: Slope
    climb: float | None


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
            name: Growth(pooled([*lives.values()], self.warm_up_s), late([*lives.values()]), climb([*lives.values()]))
            for name, lives in sorted(self._readings.items())
        }

    def findings(self) -> list[str]:
        """Of what a process says it holds: not of its resident memory, which follows the system's moods too."""
        return [
            f"{name}: climbs by {grown.climb} a minute, and {most} is the most"
            for name, grown in self.growth().items()
            for what, most in MOST_PER_MINUTE.items()
            if name.endswith(what) and grown.climb is not None and grown.climb > most
        ]


def late(lives: list[list[tuple[float, float]]]) -> Slope:
    """The slope of the second half of the longest life."""
    longest = max(lives, key=lambda life: life[-1][0] - life[0][0])
    return pooled([longest], (longest[-1][0] - longest[0][0]) / 2)


def climb(lives: list[list[tuple[float, float]]]) -> float | None:
    """The steepest of the lives that were long enough to tell: a minute's lowest reading is what is held without the
    requests that run, and the median of the slopes between all minutes takes no notice of one that stands out. None
    where no life was long."""
    found = []
    for life in lives:
        begun = life[0][0] + FILLS_S
        whole = range(int((life[-1][0] - begun) // 60))
        lowest: dict[int, float] = {}
        for at, value in life:
            if (minute := int((at - begun) // 60)) in whole:
                lowest[minute] = min(value, lowest.get(minute, math.inf))
        if len(lowest) >= LEAST_MINUTES:
            floors = sorted(lowest.items())
            found.append(
                statistics.median((b - a) / (j - i) for k, (i, a) in enumerate(floors) for j, b in floors[k + 1 :])
            )
    return round(max(found), 4) if found else None


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

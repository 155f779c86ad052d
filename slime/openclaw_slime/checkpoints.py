"""The node's checkpoints: their folders, and the schedule of the next one.

A checkpoint that cannot be written (a full disk, a format that Megatron refuses) does not end the run. The version
stays in Megatron and in the engine, not durable, and the loop tries again after growing pauses. The risk is bounded:
once a crash would cost the steps of `MOST_UNKEPT` checkpoints, the loop makes no more until one is written.

A checkpoint counts once its files are flushed to the disk: a mark beside Megatron's folder says so (`seal`). The driver
names the marked checkpoints to the server at each start, so that one whose report was lost is found again.
"""

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.backoff import Backoff
from openclaw_rl.trainer_protocol import Tip

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
MOST_UNKEPT = 5
_MARK = "whole_"
_FOLDER = re.compile(r"full-(\d+)$")


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Folders of a version: Megatron's checkpoint for a resume, and a Hugging Face export for the engine.

    Both carry the fence of the lease that made the version: it is known before the commit and never used again.
    """

    data_dir: Path
    every: int = 20
    """Steps between two checkpoints."""
    every_s: float = 1800.0
    """Longest time of a step without a checkpoint."""
    keep: int = 2
    """Megatron checkpoints to keep, each with the optimizer. The server prunes the exports."""

    @property
    def megatron(self) -> Path:
        return self.data_dir / "megatron"

    def folder(self, fence: int) -> str:
        """Return the export's folder, relative to the data directory."""
        return f"versions/full-{fence}"

    def save_arguments(self) -> list[str]:
        # Megatron needs an interval with --save; the driver decides when to save.
        arguments = ["--save", str(self.megatron), "--save-interval", str(self.every)]
        return [*arguments, "--save-hf", str(self.data_dir / "versions" / "full-{rollout_id}")]

    def load_arguments(self, tip: Tip, base: str) -> list[str]:
        """Return slime's arguments to load the tip. An export alone starts with fresh moments."""
        if tip.folder is None:
            return ["--load", base]
        fence = self.fence_of(tip)
        if fence is not None and self._iteration(fence).is_dir():
            return ["--load", str(self.megatron), "--ckpt-step", str(fence)]
        return ["--load", str(self.data_dir / tip.folder)]

    def fence_of(self, tip: Tip) -> int | None:
        """Return the fence of the lease that made the tip; None for the base."""
        found = _FOLDER.search(tip.folder or "")
        return int(found[1]) if found else None

    def seal(self, fence: int) -> None:
        """Flush a written checkpoint to the disk and mark it as whole. Blocks. Raises OSError if a file is missing."""
        export = self._export(fence)
        if not any(export.iterdir()):
            raise FileNotFoundError(f"the export {export} is empty")
        for folder in (self._iteration(fence), export):
            for place in (*folder.rglob("*"), folder):
                _flush(place)
        for file in self.megatron.iterdir():  # the tracker, and the method's state
            if file.is_file():
                _flush(file)
        mark = self._mark(fence)
        mark.touch()
        for place in (mark, self.megatron, export.parent, self.data_dir):
            _flush(place)

    def whole_fences(self) -> list[int]:
        """Return the fences of the checkpoints that are whole on disk, oldest first."""
        marked = sorted(int(mark.name.removeprefix(_MARK)) for mark in self.megatron.glob(f"{_MARK}*"))
        return [fence for fence in marked if self._iteration(fence).is_dir() and self._export(fence).is_dir()]

    def is_whole(self, fence: int) -> bool:
        return fence in self.whole_fences()

    def prune(self) -> None:
        kept = sorted(self.megatron.glob("iter_*"), key=lambda folder: folder.name)
        for folder in kept[: -self.keep]:
            self._mark(int(folder.name.removeprefix("iter_"))).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)

    def discard(self, fence: int) -> None:
        """Delete the files that a failed save left: half a checkpoint takes the room of a whole one."""
        self._mark(fence).unlink(missing_ok=True)
        for folder in (self._iteration(fence), self._export(fence)):
            shutil.rmtree(folder, ignore_errors=True)

    def _iteration(self, fence: int) -> Path:
        return self.megatron / f"iter_{fence:07d}"

    def _export(self, fence: int) -> Path:
        return self.data_dir / self.folder(fence)

    def _mark(self, fence: int) -> Path:
        return self.megatron / f"{_MARK}{fence:07d}"


def _flush(place: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Due:
    """Schedule of the next checkpoint, by the steps that are on no disk and by the age of the oldest one."""

    def __init__(
        self, every: int, every_s: float = float("inf"), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """every, every_s: steps and seconds; whichever is over first. clock: monotonic seconds."""
        self._every, self._every_s, self._clock = every, every_s, clock
        self._steps, self._first_at = 0, 0.0
        self._pauses, self._again_at = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0.0

    @property
    def is_now(self) -> bool:
        is_old = self._steps > 0 and self._clock() - self._first_at >= self._every_s
        return (is_old or self._steps >= self._every) and self.may_try

    @property
    def may_try(self) -> bool:
        """False during the pause after a failed checkpoint."""
        return self._clock() >= self._again_at

    @property
    def is_too_far(self) -> bool:
        """True if the loop must make no more steps until a checkpoint is written."""
        return self._steps >= MOST_UNKEPT * self._every

    def stepped(self) -> None:
        if not self._steps:
            self._first_at = self._clock()
        self._steps += 1

    def kept(self) -> None:
        self._steps, self._again_at = 0, 0.0
        self._pauses.reset()

    def failed(self) -> float:
        """Note a failed checkpoint. Return the seconds until the next attempt."""
        pause_s = self._pauses.next_s()
        self._again_at = self._clock() + pause_s
        return pause_s

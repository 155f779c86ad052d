"""Where the node keeps its versions, and when the next checkpoint is due.

A checkpoint that cannot be written (a full disk, a format that Megatron refuses) does not end the run: what was learned
stays in Megatron and in the engine, not durable, and is tried again after growing pauses. It is bounded: when a crash
would cost `MOST_UNKEPT` checkpoints' worth of steps, no more are made until one could be kept.
"""

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
_FOLDER = re.compile(r"full-(\d+)$")


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Megatron's own checkpoint of a version to go on from, and an HF export that the engine can load.

    Both are named after the fence of the lease that made the version: known before the commit, never used again.
    """

    data_dir: Path
    every: int = 20
    """Steps between two."""
    keep: int = 2
    """Of Megatron's: each is the weights and the optimizer. The exports are the server's to prune."""

    @property
    def megatron(self) -> Path:
        return self.data_dir / "megatron"

    def folder(self, fence: int) -> str:
        """Of the export, relative to the data directory."""
        return f"versions/full-{fence}"

    def save_arguments(self) -> list[str]:
        # Megatron wants an interval with --save; it is the driver that counts.
        arguments = ["--save", str(self.megatron), "--save-interval", str(self.every)]
        return [*arguments, "--save-hf", str(self.data_dir / "versions" / "full-{rollout_id}")]

    def load_arguments(self, tip: Tip, base: str) -> list[str]:
        """Where slime reads the tip. An export without Megatron's checkpoint starts with fresh moments."""
        if tip.folder is None:
            return ["--load", base]
        fence = self.fence_of(tip)
        if fence is not None and self._iteration(fence).is_dir():
            return ["--load", str(self.megatron), "--ckpt-step", str(fence)]
        return ["--load", str(self.data_dir / tip.folder)]

    def fence_of(self, tip: Tip) -> int | None:
        """Of the lease that made it; None for the base."""
        found = _FOLDER.search(tip.folder or "")
        return int(found[1]) if found else None

    def prune(self) -> None:
        kept = sorted(self.megatron.glob("iter_*"), key=lambda folder: folder.name)
        for folder in kept[: -self.keep]:
            shutil.rmtree(folder, ignore_errors=True)

    def discard(self, fence: int) -> None:
        """What a save that failed may have left: half a checkpoint takes the room of a whole one."""
        for folder in (self._iteration(fence), self.data_dir / self.folder(fence)):
            shutil.rmtree(folder, ignore_errors=True)

    def _iteration(self, fence: int) -> Path:
        return self.megatron / f"iter_{fence:07d}"


class Due:
    """Counts the steps that are on no disk. `clock`: monotonic seconds."""

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._steps = 0
        self._pauses, self._again_at = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0.0

    @property
    def is_now(self) -> bool:
        return self._steps >= self._every and self._clock() >= self._again_at

    @property
    def is_too_far(self) -> bool:
        """No more steps until a checkpoint is kept."""
        return self._steps >= MOST_UNKEPT * self._every

    def stepped(self) -> None:
        self._steps += 1

    def kept(self) -> None:
        self._steps, self._again_at = 0, 0.0
        self._pauses.reset()

    def failed(self) -> float:
        """Seconds until the next try."""
        pause_s = self._pauses.next_s()
        self._again_at = self._clock() + pause_s
        return pause_s

"""Event files for TensorBoard, by tensorboardX in `tracking/tensorboard/<run>`. No data leaves the machine."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from openclaw_rl.telemetry.trackers.base import TrackedRun, Tracker


class TensorBoard(Tracker):
    needs, extra = "tensorboardX", "tensorboard"

    def start(self, run: TrackedRun) -> None:
        with _without_torch():
            from tensorboardX import SummaryWriter
        # The library names a file by the second: a server that starts again within it would write over the first.
        suffix = f".{time.time_ns()}"
        self._writer = SummaryWriter(logdir=str(run.folder / "tensorboard" / run.id), filename_suffix=suffix)

    def step(self, version: int, at: float, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, global_step=version, walltime=at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@contextmanager
def _without_torch() -> Iterator[None]:
    """Let imports in the block find no torch, unless it is loaded already."""
    # tensorboardX imports torch where it is installed, for tensors that it never gets here. The server's process would
    # pay for it with 300 MB and seconds of one core.
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own mark of a module that cannot be imported
    try:
        yield
    finally:
        del sys.modules["torch"]

"""A long run in a process of its own, beside the other tests: started early, waited for late."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NICE = 5


@dataclass(frozen=True, slots=True)
class Ended:
    status: int
    stdout: str
    stderr: str


class Beside:
    """Started when it is made; what it writes goes to files in `folder`, so that nothing fills a pipe meanwhile."""

    def __init__(self, argv: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True)
        self._out, self._err = folder / "stdout", folder / "stderr"
        nicely = ["nice", "-n", str(NICE), sys.executable, *argv]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(nicely, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=out, stderr=err)

    def wait(self, timeout_s: float) -> Ended:
        """Raises subprocess.TimeoutExpired."""
        status = self._process.wait(timeout_s)
        return Ended(status, self._out.read_text(), self._err.read_text())

    def stop(self) -> None:
        """End it if it still runs; its own processes end with it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

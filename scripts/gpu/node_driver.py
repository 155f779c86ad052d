"""The trainer's process in a check, and what its log says."""

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from openclaw_slime.processes import Command, Restarted


class Driver:
    """The trainer's process, started again by the node's own supervision until the part ends."""

    def __init__(self, command: Command, log: Path) -> None:
        self.log, self._read = log, 0
        self._stop = threading.Event()
        self.exits: list[int] = []
        self._restarted = Restarted(command, log)
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self._stop.wait(0.2):
            code = self._restarted.look()
            if code is not None:
                self.exits.append(code)

    def wait_for_line(self, what: str, timeout_s: float) -> bool:
        """Whether a new line says so, in time."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with self.log.open("rb") as log:
                log.seek(self._read)
                text = log.read()
            if what.encode() in text:
                self._read += text.index(what.encode()) + len(what)
                return True
            time.sleep(0.002)
        return False

    def skip(self) -> None:
        self._read = self.log.stat().st_size

    def find(self, *words: str) -> list[psutil.Process]:
        """Processes below the driver whose command line has one of the words."""
        found = []
        with suppress(psutil.Error):
            for process in psutil.Process(self._restarted.process._popen.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if any(word in " ".join(process.cmdline()) for word in words):
                        found.append(process)
        return found

    def stop(self, grace_s: float) -> None:
        self._stop.set()
        self._thread.join(5)
        below = self.find("")
        self._restarted.process.stop(grace_s)
        for process in below:
            with suppress(psutil.Error):
                process.kill()


def driver_figures(log: Path, start: int) -> dict[str, Any]:
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    metrics = [line.split(": ", 1)[1] for line in lines if " version " in line and ": {" in line]
    parsed = []
    for text in metrics:
        with suppress(ValueError):
            parsed.append(json.loads(text))
    keys = ("loss", "abs_log_ratio", "masked_share", "samples", "fillers", "grad_norm", "hint_share", "reward_share")
    wanted = ("started again", "is durable", "not sent", "not taken", "server_away", "left out")
    notable = [line[-220:] for line in lines if any(w in line for w in wanted)]
    return {
        "steps": len(parsed),
        "step metrics": [{k: round(v, 4) for k, v in row.items() if k in keys} for row in parsed[:16]],
        "notable": notable[:12],
    }

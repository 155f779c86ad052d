"""JSON lines in the data directory: the tracker that always runs, and needs no package.

One line per step: `version`, `at` (seconds since 1970), and the figures by their public names. Samples are a line of
their own. Two files at most: `metrics.jsonl` and the one before it, `metrics.1.jsonl`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from openclaw_rl.telemetry.trackers.base import TrackedRun, TrackedSample, Tracker

FILE, BEFORE = "metrics.jsonl", "metrics.1.jsonl"


class JsonLines(Tracker):
    def start(self, run: TrackedRun) -> None:
        self._path, self._before = run.folder / FILE, run.folder / BEFORE
        self._most_bytes = int(1e6 * run.settings.jsonl_mb)
        if _is_torn(self._path):
            self._append(b"")  # a crash left half a line: the next one must not continue it

    def step(self, version: int, at: float, figures: Mapping[str, float]) -> None:
        self._append(orjson.dumps({"version": version, "at": at, **figures}))

    def samples(self, version: int, at: float, rows: Sequence[TrackedSample]) -> None:
        self._append(orjson.dumps({"version": version, "at": at, "samples": [asdict(row) for row in rows]}))

    def _append(self, line: bytes) -> None:
        if self._path.exists() and self._path.stat().st_size + len(line) >= self._most_bytes:
            self._path.replace(self._before)
        # Opened for each line: the owner may move or delete the file at any time.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(line + b"\n")


def _is_torn(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"

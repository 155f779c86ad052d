"""JSON lines: one line per step, two files at most, and no line that a crash spoils."""

import json
from pathlib import Path
from typing import Any

from openclaw_rl.settings import TrackingSettings
from openclaw_rl.telemetry.trackers.base import TrackedRun, TrackedSample
from openclaw_rl.telemetry.trackers.json_lines import BEFORE, FILE, JsonLines


def started(folder: Path, **settings: Any) -> JsonLines:
    tracker = JsonLines()
    tracker.start(TrackedRun("run", folder, TrackingSettings(**settings), {}))
    return tracker


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_a_step_and_its_samples_are_lines(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.step(3, 7.5, {"train/loss": 0.25})
    tracker.samples(3, 7.5, [TrackedSample("chatcmpl-1", -1, 12, 5, 2, False)])
    tracker.close()
    step, samples = lines(tmp_path / FILE)
    assert step == {"version": 3, "at": 7.5, "train/loss": 0.25}
    assert samples["samples"] == [
        {
            "turn_id": "chatcmpl-1",
            "verdict": -1,
            "prompt_tokens": 12,
            "response_tokens": 5,
            "sampled_by": 2,
            "is_practice": False,
        }
    ]
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def test_the_two_files_are_bounded_and_the_newest_lines_stay(tmp_path: Path) -> None:
    tracker = started(tmp_path, jsonl_mb=0.001)
    for version in range(1, 200):
        tracker.step(version, 1.0, {"train/loss": 0.5})
    assert {path.name for path in tmp_path.iterdir()} == {FILE, BEFORE}
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    versions = [line["version"] for line in (*lines(tmp_path / BEFORE), *lines(tmp_path / FILE))]
    assert versions == list(range(versions[0], 200))


def test_half_a_line_of_a_crash_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"version": 1}\n{"vers')
    started(tmp_path).step(2, 1.0, {})
    assert (tmp_path / FILE).read_text().splitlines()[-1] == '{"version":2,"at":1.0}'

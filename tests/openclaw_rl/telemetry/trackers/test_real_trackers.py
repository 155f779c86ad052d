"""The real tensorboardX, trackio and wandb, each in a process of its own: their files, read again.

A process each, because they keep the state of a process: environment, folder, children.
"""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import TrackingSettings
from openclaw_rl.telemetry.trackers import base
from openclaw_rl.telemetry.trackers.base import Tracker, load_tracker

SEND = """
import socket, sys, time
from pathlib import Path
from openclaw_rl.settings import TrackingSettings
from openclaw_rl.telemetry.trackers.base import TrackedRun, TrackedSample, load_tracker

def refused(self, address):
    assert self.family == socket.AF_UNIX or address[0] == "127.0.0.1", f"it calls {address}"
    return connect(self, address)

connect, socket.socket.connect = socket.socket.connect, refused
folder, name = Path(sys.argv[1]), sys.argv[2]
run = TrackedRun("openclaw-rl-1234", folder, TrackingSettings(trackers=(name,)), {"method": "opd", "batch_size": 4})
for versions in ((1, 2), (3,)):  # the second round is a restart of the server
    tracker = load_tracker(name)()
    tracker.start(run)
    for version in versions:
        tracker.step(version, 1000.0 + version, {"train/loss": version / 8, "rollout/raw_reward": 0.5})
        tracker.samples(version, 1000.0 + version, [TrackedSample("chatcmpl-1", 1, 3, 4, 0, False)])
    tracker.step(1, 1010.0, {"version/rolled_back": 1.0})
    tracker.close()
    second = int(time.time())
    while int(time.time()) == second:  # wandb names a run's folder by the second, and no server restarts within one
        time.sleep(0.05)
assert "torch" not in sys.modules, "the server's process would pay for it"
"""
ELSEWHERE = {
    "TRACKIO_SPACE_ID": "someone/space",
    "TRACKIO_SERVER_URL": "https://trackio.invalid",
    "HF_TOKEN": "hf_none",
    "WANDB_API_KEY": "0" * 40,
    "WANDB_BASE_URL": "https://wandb.invalid",
}
"""An environment that points each library to another host."""
STEPS = {1: 0.125, 2: 0.25, 3: 0.375}


def send(name: str, folder: Path) -> None:
    environ = os.environ | ELSEWHERE | {"HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SEND, str(folder), name],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_tensorboardx_writes_event_files(tmp_path: Path) -> None:
    send("tensorboardx", tmp_path)
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = {}
    for file in (tmp_path / "tensorboard" / "openclaw-rl-1234").iterdir():
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)  # length, its checksum, the record, its checksum
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    assert found["train/loss"] == STEPS
    assert found["version/rolled_back"] == {1: 1.0}


def test_trackio_writes_a_database_in_the_data_directory_whatever_the_environment_names(tmp_path: Path) -> None:
    send("trackio", tmp_path)
    with sqlite3.connect(tmp_path / "trackio" / "openclaw-rl.db") as db:
        rows = db.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert {name for name, _, _ in rows} == {"openclaw-rl-1234"}
    figures = [(step, json.loads(text)) for _, step, text in rows]
    assert {step: found["train/loss"] for step, found in figures if "train/loss" in found} == STEPS
    assert (1, {"version/rolled_back": 1.0}) in figures


def test_wandb_writes_offline_runs_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    send("wandb", tmp_path)
    files = list((tmp_path / "wandb").glob("offline-run-*-openclaw-rl-1234/*.wandb"))
    assert len(files) == 2
    found = [line for file in files for line in history(file)]
    assert {line["version"]: line["train/loss"] for line in found if "train/loss" in line} == STEPS
    assert {line["version"] for line in found if "version/rolled_back" in line} == {1}


def history(file: Path) -> list[dict[str, Any]]:
    """Return the lines that an offline run holds for `wandb sync`: a LevelDB log behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found, whole = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # a block's end that holds no header is padding
            at += left
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)  # checksum, length; 1: whole, 2-4: first, middle, last
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):
            record, whole = Record.FromString(whole), b""
            items = record.history.item
            if items:
                found.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def test_a_named_tracker_without_its_package_is_one_line_that_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    (line,) = base.problems(TrackingSettings(trackers=("tensorboardx",)))
    assert "tensorboardX is not installed: pip install 'openclaw-rl[tensorboard]'" in line
    assert list(base.problems(TrackingSettings())) == []


def test_a_name_that_no_package_registers_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no tracker 'tensorbord'; installed: jsonl, tensorboardx, trackio, wandb"):
        TrackingSettings(trackers=("tensorbord",))
    with pytest.raises(SettingsError, match="no tracker"):
        load_tracker("tensorbord")


def test_every_shipped_tracker_can_be_loaded_without_its_package() -> None:
    assert all(issubclass(load_tracker(name), Tracker) for name in ("jsonl", "tensorboardx", "trackio", "wandb"))

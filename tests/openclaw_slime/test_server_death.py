"""`kill -9` of a node's server, under the real launcher: toy processes over the real ledger and trainer API."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from ports import free_port

from openclaw_slime import processes
from openclaw_slime.checkpoints import Checkpoints
from openclaw_slime.processes import Command, run

TESTS = Path(__file__).parents[1]


def test_the_run_goes_on_from_the_checkpoint_that_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the server died before the checkpoint was reported to it."""
    folders = (str(TESTS / "openclaw_slime/toy"), str(TESTS / "support"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(processes, "POLL_S", 0.05)
    port = free_port()
    server, driver = (
        Command(kind, sys.executable, "toy_processes", (kind, str(tmp_path)), port=port)
        for kind in ("server", "driver")
    )
    assert run(None, server, driver, data_dir=tmp_path) == 0
    found, tip = (json.loads((tmp_path / name).read_text()) for name in ("found.json", "started_again"))
    (fence,) = Checkpoints(tmp_path).whole_fences()
    assert (tip["weight_version"], tip["folder"]) == (1, Checkpoints(tmp_path).folder(fence))
    assert [(number, durable) for number, _, durable in found["versions"]] == [(0, True), (1, True)]
    assert found["turns"] == [["trained", 1]] * 2
    assert found["audit"] == []

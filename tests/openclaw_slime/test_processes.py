"""The processes of a node, with toy commands in the place of SGLang, the server and the driver."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_port

from openclaw_rl.errors import SettingsError
from openclaw_slime import processes
from openclaw_slime.processes import Command, run

TOYS = """
import http.server, json, os, signal, sys, time
from pathlib import Path
kind, folder = sys.argv[1], Path(sys.argv[2])
def leave(*_):
    with (folder / "events").open("a") as file:
        file.write(f"{kind} stopped\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)  # before the word that lets a test stop it
with (folder / "events").open("a") as file:
    file.write(f"{kind} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
if kind == "server":
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "server.json").write_text("{}")
if kind == "prm":
    class Info(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"model_path": sys.argv[4]}).encode())
        def log_message(self, *_): pass
    import threading
    server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[3])), Info)
    threading.Thread(target=server.serve_forever, daemon=True).start()
if kind == "driver" and len((folder / "events").read_text().split("driver 0")) == 2:
    sys.exit(75)
if kind == "mortal":  # a server that dies once its driver runs, and takes reports
    starts = (folder / "events").read_text().count("mortal")
    reports = folder / "reports"
    class Api(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            said = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with reports.open("a") as file:
                file.write(json.dumps([self.path, self.headers["authorization"], said]) + "\\n")
            self.send_response(200)
            self.end_headers()
        def log_message(self, *_): pass
    import threading
    server = http.server.HTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for place, text in (("run/server.json", json.dumps({"url": f"http://127.0.0.1:{server.server_port}"})),
                        ("keys/trainer.token", "secret\\n")):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(text)
    while starts == 1 and "loops" not in (folder / "events").read_text():
        time.sleep(0.02)
    if starts == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
if kind == "gone" and (folder / "events").read_text().count("gone") > 1:
    sys.exit("EngineError: the engine does not start")
if kind == "gone":
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "server.json").write_text("{}")
    while "driver" not in (folder / "events").read_text():  # the launcher has seen it up
        time.sleep(0.02)
    (folder / "run" / "server.json").unlink()
    sys.exit(2)
if kind == "loops":
    print("AssertionError: this rank has another shape\\nkilled 3 processes", flush=True)
    sys.exit(1)
if kind == "refuses":
    with (folder / "events").open("a") as file:
        file.write("refused\\n")
    print("slime: placement_group.py has no create_placement_groups", flush=True)
    sys.exit(2)
if kind == "broken":
    sys.exit("--hf-checkpoint: no such folder")
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "node_toys.py").write_text(TOYS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def command(kind: str, folder: Path, *more: str, **fields: object) -> Command:
    environ = {"CUDA_VISIBLE_DEVICES": {"driver": "0", "server": "1"}.get(kind, "2")}
    return Command(kind, sys.executable, "node_toys", (kind, str(folder), *more), environ, **fields)  # type: ignore[arg-type]


LAUNCH = """
import sys
from pathlib import Path
from openclaw_slime import processes
processes.FIRST_PAUSE_S = 0.1
exec(sys.argv[1])
"""


def stopped_after(launch: "subprocess.Popen[str]", has_happened: Callable[[], object]) -> str:
    """Wait for the event, send SIGTERM, and return what the launcher said. It must end with 0."""
    end = time.monotonic() + 120
    while not has_happened():
        assert launch.poll() is None, launch.communicate()
        assert time.monotonic() < end, launch.kill()
        time.sleep(0.05)
    launch.send_signal(signal.SIGTERM)
    _, said = launch.communicate(timeout=120)
    assert launch.returncode == 0
    return said


def test_all_start_in_order_a_dead_driver_comes_back_and_a_stop_ends_each(toys: Path) -> None:
    port = free_port()
    code = f"""
from openclaw_slime.processes import Command
folder = Path({str(toys)!r})
def command(kind, *more, **fields):
    environ = {{"CUDA_VISIBLE_DEVICES": {{"driver": "0", "server": "1"}}.get(kind, "2")}}
    return Command(kind, sys.executable, "node_toys", (kind, str(folder), *more), environ, **fields)
prm = command("prm", "{port}", "JUDGE", port={port}, model="JUDGE")
sys.exit(processes.run(prm, command("server", port={free_port()}), command("driver"), data_dir=folder))
"""
    launch = subprocess.Popen([sys.executable, "-c", LAUNCH, code], stderr=subprocess.PIPE, text=True, env=os.environ)
    events = toys / "events"
    said = stopped_after(launch, lambda: events.exists() and events.read_text().count("driver 0") >= 2)
    assert "driver ended with 75" in said
    assert events.read_text().split("\n")[:-1] == [
        "prm 2",
        "server 1",
        "driver 0",
        "driver 0",
        "driver stopped",
        "server stopped",
        "prm stopped",
    ]


def test_a_server_that_does_not_start_ends_the_run_with_its_last_words(
    toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
    with pytest.raises(SettingsError, match="broken does not start"):
        run(None, command("broken", toys, port=free_port()), command("driver", toys), data_dir=toys)
    assert "driver" not in (toys / "events").read_text()


def test_a_port_in_use_is_named_before_anything_starts(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"server: port {port} is in use"):
            run(None, command("server", toys, port=port), command("driver", toys), data_dir=toys)
    assert not (toys / "events").exists()


def test_a_prm_that_serves_another_model_is_refused(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines on one port once judged with the policy's own weights, without an error."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    port = free_port()
    prm = command("prm", toys, str(port), "POLICY", port=port, model="JUDGE")
    with pytest.raises(SettingsError, match="serves 'POLICY'"):
        run(prm, command("server", toys, port=free_port()), command("driver", toys), data_dir=toys)
    assert (toys / "events").read_text() == "prm 2\nprm stopped\n"


def test_a_server_that_dies_comes_back_and_hears_why_its_driver_ends(toys: Path) -> None:
    code = f"""
from openclaw_slime.processes import Command
folder = Path({str(toys)!r})
def command(kind, *more, **fields):
    return Command(kind, sys.executable, "node_toys", (kind, str(folder), *more), {{}}, **fields)
sys.exit(processes.run(None, command("mortal", port={free_port()}), command("loops"), data_dir=folder))
"""
    launch = subprocess.Popen([sys.executable, "-c", LAUNCH, code], stderr=subprocess.PIPE, text=True, env=os.environ)
    events, reports = toys / "events", toys / "reports"
    said = stopped_after(
        launch,
        lambda: (
            events.exists() and events.read_text().count("mortal") >= 2 and reports.exists() and reports.read_text()
        ),
    )
    assert "mortal ended with -9" in said
    path, key, body = json.loads(reports.read_text().splitlines()[0])
    assert (path, key) == ("/v1/trainer/failed", "Bearer secret")
    assert (body["trainer"], body["has_ended"]) == ("loops", True)
    assert body["reason"].startswith("it ended with 1 after ")
    assert f"AssertionError: this rank has another shape ({toys}/logs/driver.log)" in body["reason"]


def test_a_driver_that_cannot_start_is_told_at_once_and_ends_neither_the_run_nor_the_chats(toys: Path) -> None:
    code = f"""
from openclaw_slime.processes import Command
folder = Path({str(toys)!r})
processes.CANNOT_START_PAUSE_S = 0.5
def command(kind, *more, **fields):
    return Command(kind, sys.executable, "node_toys", (kind, str(folder), *more), {{}}, **fields)
(folder / "events").write_text("mortal\\n")  # as if it had died once: it lives now
sys.exit(processes.run(None, command("mortal", port={free_port()}), command("refuses"), data_dir=folder))
"""
    launch = subprocess.Popen([sys.executable, "-c", LAUNCH, code], stderr=subprocess.PIPE, text=True, env=os.environ)
    reports = toys / "reports"
    said = stopped_after(launch, lambda: reports.exists() and reports.read_text().count("\n") >= 2)
    assert "refuses ended with 2, again in 0 s: slime: placement_group.py has no create_placement_groups" in said
    assert (toys / "events").read_text().count("mortal None") == 1  # the server and its chats went on
    _, _, body = json.loads(reports.read_text().splitlines()[0])
    assert (body["cannot_start"], body["has_ended"]) == (True, True)
    assert body["reason"].startswith("it cannot start: slime: placement_group.py has no create_placement_groups (")


def test_a_server_that_does_not_come_up_again_ends_the_run(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(processes, "POLL_S", 0.05)
    assert run(None, command("gone", toys, port=free_port()), command("driver", toys), data_dir=toys) == 1
    assert (toys / "events").read_text().count("gone") == 1 + processes.MOST_FAILED_STARTS - 1

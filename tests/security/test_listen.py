"""No socket listens beyond loopback without a key."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.embedded.config import EngineConfig
from openclaw_rl.engines.embedded.kind import KIND
from openclaw_rl.engines.sglang import launch
from openclaw_rl.errors import SettingsError
from openclaw_rl.server.lifecycle import listen
from openclaw_rl.settings import EngineSettings, Settings, load

PUBLIC = ["0.0.0.0", "::", "192.168.1.5", "example.org", ""]


@pytest.mark.parametrize("host", PUBLIC)
def test_the_server_refuses_before_it_listens(host):
    with pytest.raises(SettingsError, match=r"set server\.api_keys first"):
        load(None, {"server.host": host}, {})


def test_serve_ends_at_once_and_names_the_setting(tmp_path):
    argv = [sys.executable, "-m", "openclaw_rl", "serve", "--host", "0.0.0.0", "--data-dir", str(tmp_path / "data")]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "openclaw-rl: server.host '0.0.0.0' is not loopback: set server.api_keys first\n"
    assert not (tmp_path / "data").exists()


def test_a_loopback_name_that_is_none_here_is_refused_too(monkeypatch):
    """The machine's own files decide which address `localhost` is."""
    import socket

    real = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda address, **kwargs: real(("0.0.0.0", address[1]), **kwargs))
    with pytest.raises(SettingsError, match=r"is 0\.0\.0\.0 here, which is not loopback"):
        listen(load(None, {"server.host": "localhost", "server.port": 0}, {}))


@pytest.mark.parametrize("host", PUBLIC)
def test_the_embedded_engine_has_no_key_and_listens_on_loopback_alone(host, tmp_path):
    with pytest.raises(ValidationError, match=r"loopback alone|IPv4 or IPv6"):
        EngineConfig(host=host, cache_dir=tmp_path)


def test_the_engine_we_start_is_told_loopback(tmp_path):
    data = DataDir.prepare(tmp_path)

    async def nothing() -> None: ...

    KIND.child(Settings(), data, 1234, nothing)
    assert json.loads((data.run / "engine.json").read_text())["host"] == "127.0.0.1"
    assert (data.run / "engine.json").stat().st_mode & 0o777 == 0o600
    installed = launch.Installed("0.5.15", frozenset({"incremental_streaming_output"}), True, True)
    flags = launch.argv(
        installed, EngineSettings(), folder=tmp_path, name="m", port=1, context_length=None, adapters=None
    )
    assert flags[flags.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize("args", [["--host", "0.0.0.0"], ["--host=0.0.0.0"], ["--tp", "2", "--host", "::"]])
def test_sglang_cannot_be_told_otherwise(args):
    with pytest.raises(SettingsError, match="listens on loopback alone"):
        load(None, {"engine.args": args}, {})


def test_every_socket_of_a_running_server_is_on_loopback(open_server):
    """Admin routes, the trainer API and metrics have no listener of their own."""
    listening = _listening(int((open_server.server.data_dir / "ledger.sqlite3.lock").read_text()))
    assert listening == {("127.0.0.1", int(open_server.server.url.rpartition(":")[2]))}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"server.admin_key": ""}, "a key must have characters"),
        ({"server.trainer_token": ""}, "a key must have characters"),
        ({"server.api_keys": [{"key": ""}]}, "a key must have characters"),
        ({"server.api_keys": [{"key": " "}]}, "a key must have characters"),
        ({"server.api_keys": [{"key": "k"}], "server.admin_key": "k"}, "must all differ"),
        ({"server.api_keys": [{"key": "k", "user": "a"}, {"key": "k", "user": "b"}]}, "must all differ"),
        ({"server.admin_key": "k", "server.trainer_token": "k"}, "must all differ"),
    ],
)
def test_a_key_that_is_none_or_that_opens_two_doors_is_refused(wrong, says):
    with pytest.raises(SettingsError, match=says):
        load(None, wrong, {})


def test_an_empty_key_file_is_no_key(tmp_path):
    data = DataDir.prepare(tmp_path)
    (data.keys / "admin.key").write_text("\n")
    assert len(data.secret("admin.key", None)) >= 32
    assert data.secret("admin.key", None) == (data.keys / "admin.key").read_text()


def _listening(pid: int) -> set[tuple[str, int]]:
    """Return the listening sockets of this process, read from the kernel."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, _, port = fields[1].partition(":")
                octets = [str(int(host[at : at + 2], 16)) for at in (6, 4, 2, 0)] if table == "tcp" else [host]
                found.add((".".join(octets), int(port, 16)))
    return found

"""The command line: what it says when it cannot do what is asked, in one line and with exit code 2."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openclaw_rl.cli import app
from openclaw_rl.data_dir import DataDir, write_json


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[list[str]]:
    """A server of one answer; the keys it was shown."""
    shown: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            shown.append(self.headers["authorization"])
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"learning": False}).encode())

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    write_json(DataDir.prepare(tmp_path).server_file, {"url": f"http://127.0.0.1:{server.server_port}"})
    yield shown
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_kept_admin_key_is_shown(admin: list[str], tmp_path: Path) -> None:
    kept = DataDir.prepare(tmp_path).secret("admin.key", None)
    result = CliRunner().invoke(app, ["learning", "pause", "--data-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert admin == [f"Bearer {kept}"]


def test_a_configured_admin_key_is_shown(admin: list[str], tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(f'data_dir = "{tmp_path}"\n[server]\nadmin_key = "mine"\n')
    result = CliRunner().invoke(app, ["learning", "pause", "--config", str(config)])
    assert result.exit_code == 0, result.output
    assert admin == ["Bearer mine"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["status"], "no server runs in"),
        (["pin"], "give a version, or --off"),
        (["pin", "1", "--off"], "give a version, or --off"),
        (["train"], "openclaw-rl train --now"),
        (["feedback", "t", "--good", "--bad"], "one of --good, --bad and --value"),
        (["feedback", "t", "--good"], "no server runs in"),
        (["serve", "--set", "server.prot=1"], "server.prot: no such setting"),
        (["serve", "--set", "server.port"], "write KEY=VALUE"),
        (["serve", "--host", "0.0.0.0"], "is not loopback"),
    ],
)
def test_what_cannot_be_done_is_one_line(args: list[str], says: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*args, "--data-dir", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1

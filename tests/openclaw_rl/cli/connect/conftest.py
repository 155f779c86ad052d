"""A fake server for `connect`, and the stand-in client on the PATH."""

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import Result
from typer.testing import CliRunner

from openclaw_rl.cli.main import app
from openclaw_rl.data_dir import Announcement, DataDir, proof_of

FAKE = Path(__file__).parents[3] / "support" / "fake_openclaw.py"


@dataclass
class Server:
    """The routes that `connect` asks, and the chats that came."""

    url: str = ""
    card: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    card = {"max_model_len": 32768, "supports_tools": True, "supports_reasoning": True}
    state = Server(card=card)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("X-OpenClaw-Proof", proof_of("secret", self.headers["X-OpenClaw-Challenge"] or ""))
            self.end_headers()
            parts = urlsplit(self.path)
            if parts.path == "/v1/models/policy":
                self.wfile.write(json.dumps(state.card).encode())
            elif parts.path == "/v1/turns":
                asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
                assert set(asked) <= {"limit", "session_id", "q"}
                session, words = asked.get("session_id"), asked.get("q", "")
                found = [t for t in state.turns if session in (None, t["session_id"]) and words in t["request"]]
                self.wfile.write(json.dumps({"turns": found}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            session = (self.headers["X-Session-Affinity"] or "").partition(":")[0] or None
            row = {"turn_id": f"turn-{len(state.turns)}", "session_id": session, "oldest_version": 3}
            state.turns.append(row | {"request": body["messages"][-1]["content"], "key": self.headers["authorization"]})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            return

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    state.url = f"http://127.0.0.1:{listener.server_port}"
    Announcement.new(data := DataDir.prepare(tmp_path / "data"), state.url, version="1", proof_key="secret").write(data)
    yield state
    listener.shutdown()
    thread.join()
    listener.server_close()


@pytest.fixture
def client_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in on the PATH; return the path of its configuration, which does not exist yet."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "openclaw"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    program.chmod(0o755)
    file = tmp_path / "home" / "openclaw.json"
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("OPENCLAW_CONFIG_PATH", str(file))
    assert shutil.which("openclaw") == str(program)
    return file


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """Run `openclaw-rl connect …` on the data directory of the fake server."""

    def go(*argv: str, answer: str = "") -> Result:
        return CliRunner().invoke(app, ["connect", *argv, "--data-dir", str(tmp_path / "data")], input=answer)

    return go

"""The judge of a check on four GPUs: a frozen SGLang on the last card, made to vote.

A model of random weights never writes a vote, nor a hint. SGLang can be told what form an answer has (`regex`), and a
passthrough in front of it says so with each request. What it votes, and which hint of a few, is chance; that it is
asked, answers and is heard is not.
"""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from engine_process import EngineProcess

from openclaw_opd.prompts import HINT_START
from openclaw_slime.processes import Command

if TYPE_CHECKING:
    from node_check import Host

VOTE = r"\\boxed\{(1|-1)\}"
HINTS = "Say the most important thing first|Name one example that everybody knows|Leave out what is obvious"
HINT = rf"(\\boxed\{{-1\}}|\\boxed\{{1\}}\n\[HINT_START\]({HINTS})\[HINT_END\])"
MOST_TOKENS = 128
"""A form may be followed letter by letter."""
ARGS = ("--attention-backend", "triton", "--sampling-backend", "pytorch", "--disable-prefill-cuda-graph")
ARGS += ("--cuda-graph-max-bs-decode", "64", "--context-length", "8192")
"""For a host with SGLang's slow kernels alone, as the policy's engine is given them by our server."""


def start(host: "Host", command: Command) -> EngineProcess:
    """The one that runs; a new one when none does. `command`: as the node would start it. Raises RuntimeError when
    another model answers there."""
    work = host.work / "prm"
    work.mkdir(exist_ok=True)
    found = EngineProcess.known(work)
    if found is not None and found.is_alive():
        found.wait()  # it may be started by a stage beside this one
    else:
        argv = [command.python, "-m", command.module, *command.arguments, *ARGS]
        environ = host.environ | dict(command.environ)
        assert command.port is not None
        found = EngineProcess.start(work, argv, environ, log=host.out / "prm.log", port=command.port)
    info = httpx.get(f"{found.url}/model_info", timeout=20).json()
    if info["model_path"] != command.model:
        raise RuntimeError(f"port {found.port} serves {info['model_path']!r}, not the judge's model")
    return found


def stop(work: Path) -> None:
    if (found := EngineProcess.known(work / "prm")) is not None:
        found.kill()


@dataclass(slots=True)
class Votes:
    """What was asked and answered."""

    url: str
    """OpenAI-compatible, for `judge.url`."""
    answers: Counter[str] = field(default_factory=Counter)


class _Passthrough(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, client: httpx.Client) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.client, self.votes = client, Votes(f"http://127.0.0.1:{self.server_port}/v1")

    def handle_error(self, *_: object) -> None:
        """Who has a majority hangs up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Passthrough

    def do_GET(self) -> None:
        self._answer(self.server.client.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        form = HINT if HINT_START in json.dumps(body["messages"]) else VOTE
        reply = self.server.client.post(self.path, json=body | {"regex": form, "max_tokens": MOST_TOKENS})
        self.server.votes.answers[_said(reply)] += 1
        self._answer(reply)

    def _answer(self, reply: httpx.Response) -> None:
        self.send_response(reply.status_code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(reply.content)))
        with suppress(ConnectionError):  # who has a majority does not wait for the last vote
            self.end_headers()
            self.wfile.write(reply.content)

    def log_message(self, *_: object) -> None:
        pass


def _said(reply: httpx.Response) -> str:
    if not reply.is_success:
        return f"{reply.status_code}"
    return str(reply.json()["choices"][0]["message"]["content"])[:60]


@contextmanager
def voting(prm: str) -> Iterator[Votes]:
    """A passthrough to the engine at `prm`, for as long as this is open."""
    with httpx.Client(base_url=prm, timeout=120) as client, _Passthrough(client) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.votes
        finally:
            server.shutdown()
            thread.join(5)

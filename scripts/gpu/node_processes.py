"""Processes of the node check: the policy's SGLang, the judge's SGLang with its passthrough, and the driver."""

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil

from gpu.engine_process import EngineProcess, sglang_command
from gpu.host import NodeHost
from openclaw_opd.hint_judge import HINT_START
from openclaw_rl.engines.sglang import launch
from openclaw_rl.processes.command import free_port
from openclaw_rl.settings import EngineSettings
from openclaw_slime.processes import Command, Restarted

# -- the policy's engine -----------------------------------------------------------------------------------------------

ENGINE_ARGS = ("--cuda-graph-max-bs-decode", "64", "--sampling-backend", "pytorch")


@dataclass(slots=True)
class Engine:
    """The policy's SGLang, with the flags that our server would start it with. It outlives the call."""

    host: NodeHost
    running: EngineProcess

    @classmethod
    def of(cls, host: NodeHost) -> "Engine":
        """Return the engine that runs, or start one."""
        running = EngineProcess.known(host.work)
        if running is None or not running.is_healthy():
            running = _start_engine(host, free_port())
        return cls(host, running)

    @property
    def url(self) -> str:
        return self.running.url

    def kill(self) -> None:
        self.running.kill()

    def start_again(self) -> None:
        """Start the engine on the same port, after it was killed."""
        self.running = _start_engine(self.host, self.running.port)


def _start_engine(host: NodeHost, port: int) -> EngineProcess:
    settings = EngineSettings(kind="sglang", args=ENGINE_ARGS, memory_fraction=host.engine_share)
    command = sglang_command(
        host.engine_python,
        settings,
        folder=host.checkpoint,
        name="node",
        port=port,
        context_length=4096,
        adapters=None,
    )
    command += launch.TAKES_IDS  # Combined with a guided teacher scores given ids
    environ = host.environ | launch.ENVIRON | {"CUDA_VISIBLE_DEVICES": host.layout.gpus("rollout")}
    return EngineProcess.start(host.work, command, environ, log=host.out / "engine.log", port=port)


# -- the judge ---------------------------------------------------------------------------------------------------------
# A model of random weights never writes a vote or a hint. SGLang can constrain an answer to a regular expression
# (`regex`). A passthrough in front of the judge's SGLang adds one to each request. The value of a vote and the choice
# of a hint are then random; that our server asks the judge and understands the answer is not.

VOTE = r"\\boxed\{(1|-1)\}"
HINTS = "Say the most important thing first|Name one example that everybody knows|Leave out what is obvious"
HINT = rf"(\\boxed\{{-1\}}|\\boxed\{{1\}}\n\[HINT_START\]({HINTS})\[HINT_END\])"
THOUGHT_TOKENS = 3000
LONG_HINT_SAYS = "Say only what three thousand thoughts left over"
LONG_HINT = rf"<think>[0-9]{{{THOUGHT_TOKENS}}}</think>\n\\boxed\{{1\}}\n\[HINT_START\]{LONG_HINT_SAYS}\[HINT_END\]"
"""A hint behind a long thought: in the check's tokenizer each digit is a token."""
MOST_TOKENS = 128
"""Enough where the engine samples a constrained answer character by character."""
PRM_ARGS = (
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--disable-prefill-cuda-graph",
    "--cuda-graph-max-bs-decode", "64", "--context-length", "8192",
)  # fmt: skip
"""For a host that has only SGLang's slow kernels; our server gives the policy's engine the same."""


def start_prm(host: NodeHost, command: Command) -> EngineProcess:
    """Return the judge's engine that runs, or start one with the node's `command`.

    Raises RuntimeError if another model answers on its port.
    """
    work = host.work / "prm"
    work.mkdir(exist_ok=True)
    found = EngineProcess.known(work)
    if found is not None and found.is_alive():
        found.wait()  # a stage beside this one may be starting it
    else:
        argv = [command.python, "-m", command.module, *command.arguments, *PRM_ARGS, *launch.TAKES_IDS]
        environ = host.environ | dict(command.environ)
        assert command.port is not None
        found = EngineProcess.start(work, argv, environ, log=host.out / "prm.log", port=command.port)
    info = httpx.get(f"{found.url}/model_info", timeout=20).json()
    if info["model_path"] != command.model:
        raise RuntimeError(f"port {found.port} serves {info['model_path']!r}, not the judge's model")
    return found


def stop_prm(work: Path) -> None:
    """Kill the judge's engine, if one runs."""
    if (found := EngineProcess.known(work / "prm")) is not None:
        found.kill()


@dataclass(slots=True)
class Votes:
    """Answers of the judge, counted by their text."""

    url: str
    """OpenAI-compatible URL of the passthrough, for `judge.url`."""
    answers: Counter[str] = field(default_factory=Counter)
    long_hints: list[dict[str, Any]] = field(default_factory=list)
    """Figures of each answer that was given a long thought."""
    _still_long: deque[None] = field(default_factory=deque)

    def think_long(self, hints: int) -> None:
        """Give the next hints a long thought, within the token budget that our server asked for."""
        self._still_long.extend([None] * hints)

    def takes_long(self) -> bool:
        with suppress(IndexError):
            self._still_long.pop()
            return True
        return False


class _Passthrough(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, client: httpx.Client) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.client, self.votes = client, Votes(f"http://127.0.0.1:{self.server_port}/v1")

    def handle_error(self, *_: object) -> None:
        """Ignore the error of a client that closed its connection: our judge does so once it has a majority."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Passthrough

    def do_GET(self) -> None:
        self._answer(self.server.client.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        votes, is_hint = self.server.votes, HINT_START in json.dumps(body["messages"])
        if is_hint and votes.takes_long():
            reply = self._think_long(body)
        else:
            form = {"regex": HINT if is_hint else VOTE, "max_tokens": MOST_TOKENS}
            reply = self.server.client.post(self.path, json=body | form)
            votes.answers[_content_of(reply)] += 1
        self._answer(reply)

    def _think_long(self, body: dict[str, Any]) -> httpx.Response:
        began = time.monotonic()
        reply = self.server.client.post(self.path, json=body | {"regex": LONG_HINT})
        figures: dict[str, Any] = {"budget": body["max_tokens"], "s": round(time.monotonic() - began, 1)}
        if reply.is_success:
            (choice,), usage = reply.json()["choices"], reply.json().get("usage") or {}
            text = str(choice["message"]["content"])
            figures |= {"finish": choice["finish_reason"], "tokens": usage.get("completion_tokens")}
            figures |= {"thought characters": text.find("</think>") - len("<think>"), "ends": text[-60:]}
        else:
            figures["refused"] = f"{reply.status_code}: {reply.text[:300]}"
        self.server.votes.long_hints.append(figures)
        return reply

    def _answer(self, reply: httpx.Response) -> None:
        self.send_response(reply.status_code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(reply.content)))
        with suppress(ConnectionError):  # our judge closes the connection once it has a majority
            self.end_headers()
            self.wfile.write(reply.content)

    def log_message(self, *_: object) -> None:
        pass


def _content_of(reply: httpx.Response) -> str:
    if not reply.is_success:
        return f"{reply.status_code}"
    return str(reply.json()["choices"][0]["message"]["content"])[:60]


@contextmanager
def voting(prm: str) -> Iterator[Votes]:
    """Run a passthrough to the judge's engine at `prm`."""
    with httpx.Client(base_url=prm, timeout=120) as client, _Passthrough(client) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.votes
        finally:
            server.shutdown()
            thread.join(5)


# -- the driver --------------------------------------------------------------------------------------------------------


class Driver:
    """The trainer's process. The node's own supervision restarts it until the part ends."""

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
        """Read on in the log until a new line holds the text; return False after the timeout."""
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
        """Ignore the lines that the log has now."""
        self._read = self.log.stat().st_size

    def find(self, *words: str) -> list[psutil.Process]:
        """Return the driver's descendants whose command line holds one of the words."""
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
    """Return the step metrics and the notable lines of the driver's log, from byte `start` on."""
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

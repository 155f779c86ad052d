"""Judge of a check on four GPUs: our own judge parses the votes of a model that a regular expression constrains."""

import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpu import node_processes
from gpu.host import NodeHost
from openclaw_opd.hint_judge import INSTRUCTIONS, parse_hint
from openclaw_rl.judge.client import HttpJudgeClient
from openclaw_rl.judge.judge import parse_vote
from openclaw_rl.messages import Message
from openclaw_rl.settings import JudgeSettings
from openclaw_slime.processes import Command


class Engine(ThreadingHTTPServer):
    """A frozen SGLang of random weights: it says what `regex` allows, or nonsense."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        self._say({"data": [{"id": "frozen"}], "model_path": "/models/judge"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        text = r"\boxed{-1}" if re.fullmatch(body.get("regex", ""), r"\boxed{-1}") else "grün 7"
        self._say({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    def _say(self, what: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        yield engine
        engine.shutdown()


async def test_our_judge_hears_its_votes(engine: Engine) -> None:
    with node_processes.voting(f"http://127.0.0.1:{engine.server_port}") as votes:
        async with httpx.AsyncClient(trust_env=False) as client:
            ask = HttpJudgeClient(client, JudgeSettings(kind="llm", url=votes.url))
            answer = await ask([Message(role="user", content="Was it good?")], max_new_tokens=4096)
    assert parse_vote(answer.text, is_cut=answer.is_cut) == -1
    assert votes.answers == {r"\boxed{-1}": 1}
    assert (engine.asked[0]["model"], engine.asked[0]["max_tokens"]) == ("frozen", node_processes.MOST_TOKENS)


@pytest.mark.parametrize(
    "answer", ["\\boxed{-1}", "\\boxed{1}\n[HINT_START]Leave out what is obvious[HINT_END]", "\\boxed{1}"]
)
def test_a_hint_has_the_form_that_is_read(answer: str) -> None:
    assert bool(re.fullmatch(node_processes.HINT, answer)) == (parse_hint(answer).has_hint is not None)


async def test_who_asks_for_a_hint_is_given_the_form_of_one(engine: Engine) -> None:
    prompt = [Message(role="system", content=INSTRUCTIONS), Message(role="user", content="The reply to look back at:")]
    with node_processes.voting(f"http://127.0.0.1:{engine.server_port}") as votes:
        async with httpx.AsyncClient(trust_env=False) as client:
            await HttpJudgeClient(client, JudgeSettings(kind="llm", url=votes.url))(prompt, max_new_tokens=4096)
    assert engine.asked[0]["regex"] == node_processes.HINT


def test_another_model_at_its_port_is_refused(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "prm").mkdir()
    found = {"port": engine.server_port, "pid": os.getpid()}
    (tmp_path / "prm" / "engine.json").write_text(json.dumps(found))

    host = NodeHost(tmp_path, tmp_path, is_tiny=True, streams=1, gpus=4)
    command = Command("prm", "python", "sglang.launch_server", (), port=engine.server_port, model="/models/other")
    with pytest.raises(RuntimeError, match="serves '/models/judge', not the judge's model"):
        node_processes.start_prm(host, command)

"""A server whose engine is not up yet answers every request at once; the log and the operator get the reason."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from ports import free_port

from openclaw_rl.server.api.app import Door
from openclaw_rl.settings import ServerSettings

HI = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


class Loading(BaseHTTPRequestHandler):
    """An engine that loads its model: SGLang answers its health with 503 meanwhile."""

    def do_GET(self) -> None:
        self.send_response(503)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def loading() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Loading) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{engine.server_address[1]}"
        engine.shutdown()


@pytest.fixture
def absent() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"  # nobody listens there, and nobody else will


@pytest.mark.parametrize(("engine", "why"), [("absent", "does not answer"), ("loading", "/health answers 503")])
def test_a_server_whose_engine_is_not_up_answers_at_once_and_says_why(
    request: pytest.FixtureRequest, tmp_path: Path, model_folder: Path, engine: str, why: str
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")  # the engine's: this process reads the tokenizer alone
    port = free_port()
    argv = [sys.executable, "-m", "openclaw_rl", "serve", "--data-dir", str(tmp_path / "data"), "--port", str(port)]
    argv += ["--engine", "url", "--set", f"engine.url={request.getfixturevalue(engine)}", "--model", str(folder)]
    argv += ["--set", "trainer.kind=external", "--set", "log_format=json"]
    log = tmp_path / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(argv, stdout=out, stderr=out, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
            end = time.monotonic() + 120
            while "waiting_for_engine" not in log.read_text():
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            health = client.get("/healthz")
            assert (health.status_code, health.json()) == (503, {"status": "starting"})
            models = client.get("/v1/models").json()["data"]
            assert [model["id"] for model in models] == [str(folder)]
            for body in (HI, {**HI, "stream": True}):
                chat = client.post("/v1/chat/completions", json=body)
                assert chat.status_code == 503
                assert int(chat.headers["retry-after"]) > 0
                assert chat.json()["error"]["code"] == "starting"
            key = (tmp_path / "data/keys/admin.key").read_text().strip()
            (problem,) = client.get("/healthz", headers={"Authorization": f"Bearer {key}"}).json()["problems"]
            assert problem.startswith("engine: not up yet: http://127.0.0.1:")
            assert why in problem
            lines = [json.loads(line) for line in log.read_text().splitlines() if "waiting_for_engine" in line]
            assert why in lines[0]["because"]
            assert len(lines) == 1  # one line, not one each time that it is asked
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
            assert "Traceback" not in log.read_text()
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/healthz", 503),
        ("GET", "/v1/models", 200),
        ("GET", "/models", 200),
        ("GET", "/v1//models/", 200),
        ("POST", "/v1/chat/completions", 503),
        ("POST", "/chat/completions", 503),
        ("POST", "/v1/feedback", 503),
        ("POST", "/v1/trainer/lease", 503),
        ("GET", "/v1/admin/status", 503),
        ("GET", "/nowhere", 503),
    ],
)
async def test_before_it_is_ready_a_door_answers_every_path(method: str, path: str, status: int) -> None:
    door = Door(ServerSettings(), "the-policy")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://127.0.0.1") as client:
        reply = await client.request(method, path, content=b"x" * 100_000 if method == "POST" else None)
        assert reply.status_code == status
        assert ("retry-after" in reply.headers) is (status == 503)
        if status == 200:
            assert reply.json()["data"][0]["id"] == "the-policy"


async def test_a_door_has_the_page_that_tells_of_the_start() -> None:
    door = Door(ServerSettings(), "the-policy")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://127.0.0.1") as client:
        page = await client.get("/")
        assert page.status_code == 200
        assert "require-trusted-types-for" in page.headers["content-security-policy"]
        assert (await client.get("/page/main.js")).status_code == 200
        assert (await client.get("/page/nowhere.js")).status_code == 404


async def test_a_door_keeps_web_pages_out_and_the_reason_from_strangers() -> None:
    door = Door(ServerSettings(), "the-policy")
    door.admin_key, door.waits_for = "the-key", "not up yet: http://10.0.0.7:30000 does not answer"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://evil.example") as client:
        assert (await client.get("/healthz")).status_code == 403
    async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://localhost") as client:
        for key in (None, "wrong", "", "the-key "):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            told = (await client.get("/healthz", headers=headers)).text
            assert ("10.0.0.7" in told) is (key == "the-key ")
        chat = await client.post("/v1/chat/completions", json=HI)
        assert "10.0.0.7" not in chat.text


async def test_behind_an_open_door_is_the_server() -> None:
    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    door = Door(ServerSettings(), "the-policy")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://localhost") as client:
        assert (await client.get("/healthz")).status_code == 503
        door.open(app)
        assert (await client.get("/healthz")).status_code == 204

"""A harness inside a sandbox reaches the model of its episode, and nothing else of the server."""

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from openclaw_rl.agents.sandbox import Profile, Sandbox, Sandboxes
from openclaw_rl.agents.sandbox.gateway import gateway

CLIENT = """
import json, sys, urllib.request
method, path, body = sys.argv[1:]
headers = {"Content-Type": "application/json", "Authorization": "Bearer mine"}
request = urllib.request.Request("http://127.0.0.1:30000" + path, body.encode() or None, headers, method=method)
try:
    with urllib.request.urlopen(request, timeout=20) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
SEEN: list[tuple[str, str, str | None]] = []
app = FastAPI()


@app.api_route("/{path:path}", methods=["GET", "POST"])
async def anything(path: str, request: Request) -> object:
    SEEN.append((request.method, path, request.headers.get("authorization")))
    body = await request.body()
    if b"stream" in body:
        pieces = (f"data: {number}\n\n" for number in range(3))
        return StreamingResponse(pieces, media_type="text/event-stream")
    return {"bytes": len(body)}


@pytest.fixture
async def inside(sandboxes: Sandboxes) -> AsyncIterator[Sandbox]:
    SEEN.clear()
    folder = sandboxes.gateway_folder()
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport) as client,
        gateway(folder, "http://server/v1/episodes/e/v1", {"authorization": "Bearer key"}, client),
        sandboxes.sandbox(Profile(gateway=folder)) as sandbox,
    ):
        await sandbox.put({"client.py": CLIENT.encode()})
        yield sandbox


async def ask(sandbox: Sandbox, method: str, path: str, body: str = "") -> str:
    done = await sandbox.run(("python3", "client.py", method, path, body))
    return done.text.strip()


async def test_chats_and_models_of_the_episode_pass(inside: Sandbox) -> None:
    assert await ask(inside, "POST", "/v1/chat/completions", "x" * 100_000) == '200 {"bytes":100000}'
    assert await ask(inside, "GET", "/v1/models") == '200 {"bytes":0}'
    streamed = await ask(inside, "POST", "/v1/chat/completions", "stream")
    assert streamed.split() == ["200", "data:", "0", "data:", "1", "data:", "2"]
    assert SEEN == [
        ("POST", "v1/episodes/e/v1/chat/completions", "Bearer key"),
        ("GET", "v1/episodes/e/v1/models", "Bearer key"),
        ("POST", "v1/episodes/e/v1/chat/completions", "Bearer key"),
    ]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/episodes/e/outcome"),
        ("POST", "/outcome"),
        ("POST", "/v1/../../outcome"),
        ("POST", "/v1/chat/completions/../../../outcome"),
        ("POST", "/v1/%2e%2e/outcome"),
        ("POST", "/v1/feedback"),
        ("GET", "/v1/episodes"),
        ("GET", "/v1/chat/completions"),
        ("GET", "//v1/models"),
    ],
)
async def test_the_agents_own_outcome_does_not(inside: Sandbox, method: str, path: str) -> None:
    assert (await ask(inside, method, path, "{}" if method == "POST" else "")).startswith("403 ")
    assert SEEN == []


async def test_junk_ends_its_own_connection_alone(inside: Sandbox) -> None:
    assert b"200" not in await send(inside, "junk", "POST /v1/episodes/e/outcome HTTP/1.1", "")
    outcome = ("POST /v1/episodes/e/outcome HTTP/1.1", "Host: a", "")
    answer = await send(inside, "GET /v1/models HTTP/1.1", "Host: a", "", *outcome)
    assert answer.count(b"HTTP/1.1") == 1
    assert [path for _, path, _ in SEEN] == ["v1/episodes/e/v1/models"]


async def send(sandbox: Sandbox, *lines: str) -> bytes:
    """Send these lines as they are to the forwarder; return the answer."""
    text = "\\r\\n".join([*lines, ""])
    return (await sandbox.run(f"exec 3<>/dev/tcp/127.0.0.1/30000; printf '{text}' >&3; cat <&3")).output

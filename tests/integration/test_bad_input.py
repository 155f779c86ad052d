"""Bad input on the real server: a 4xx in OpenAI's form; no turn is recorded, no turn is lost."""

import json
from typing import Any

import httpx
import pytest

from openclaw_rl.testing.running_server import RunningServer

pytestmark = pytest.mark.real_model

HELLO = [{"role": "user", "content": "Hello"}]
PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.fixture(scope="module")
def server(short_server: RunningServer) -> RunningServer:
    return short_server


def ask(server: RunningServer, body: Any = None, *, key: str = "sk-test", raw: bytes | None = None) -> httpx.Response:
    content = raw if raw is not None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers, timeout=120)


CASES: dict[str, tuple[Any, int, str]] = {
    "no messages": ({"messages": []}, 400, "messages"),
    "messages missing": ({"model": "policy"}, 400, "messages"),
    "messages a string": ({"messages": "hi"}, 400, "messages"),
    "a message without a role": ({"messages": [{"content": "hi"}]}, 400, "role"),
    "a number as content": ({"messages": [{"role": "user", "content": 7}]}, 400, "content"),
    "a temperature in words": ({"messages": HELLO, "temperature": "hot"}, 400, "temperature"),
    "a negative limit": ({"messages": HELLO, "max_tokens": -1}, 400, "max_tokens"),
    "two choices": ({"messages": HELLO, "n": 2}, 400, "n"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, PNG]}]}, 400, "image_url"),
    "too long a prompt": ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "8192"),
    "a list as body": ([1, 2], 400, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_request_is_told_what_is_wrong_and_leaves_no_trace(server: RunningServer, name: str) -> None:
    body, status, says = CASES[name]
    before = server.status()["counts"]
    reply = ask(server, body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert says in error["message"]
    assert server.status()["counts"] == before


def test_too_long_a_prompt_names_the_code_and_both_numbers(server: RunningServer) -> None:
    error = ask(server, CASES["too long a prompt"][0]).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"]
    assert "90" in error["message"]  # about 9,0xx tokens


@pytest.mark.parametrize("raw", [b"{", b"", b"\xff\xfe", b'{"messages": [NaN]}', b'{"messages": 1' + b"0" * 400 + b"}"])
def test_malformed_json_is_a_400(server: RunningServer, raw: bytes) -> None:
    before = server.status()["counts"]
    reply = ask(server, raw=raw)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert server.status()["counts"] == before


def test_a_20_mb_body_is_refused(server: RunningServer) -> None:
    reply = ask(server, {"messages": [{"role": "user", "content": "x" * 20_000_000}]})
    assert reply.status_code == 413
    assert "16" in reply.json()["error"]["message"]


@pytest.mark.parametrize("key", ["", "sk-tesT", "sk-test2", "sk-test-and-more"])
def test_a_wrong_key_is_a_401(server: RunningServer, key: str) -> None:
    reply = ask(server, {"messages": HELLO}, key=key)
    assert reply.status_code == 401
    assert "sk-test" not in reply.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/admin/status"),
        ("POST", "/v1/admin/rollback"),
        ("POST", "/v1/admin/train"),
        ("GET", "/metrics"),
        ("POST", "/v1/trainer/tip"),
        ("POST", "/v1/trainer/lease"),
    ],
)
def test_a_chat_key_opens_no_route_of_the_operator_or_a_trainer(server: RunningServer, method: str, path: str) -> None:
    reply = httpx.request(method, server.url + path, headers={"Authorization": "Bearer sk-test"}, json={})
    assert reply.status_code == 401, reply.text


def test_an_alias_is_served_an_unknown_version_and_an_unknown_path_are_a_404(server: RunningServer) -> None:
    reply = ask(server, {"model": "gpt-unknown", "messages": HELLO, "max_tokens": 1})
    assert reply.status_code == 200
    reply = ask(server, {"model": "policy@v999", "messages": HELLO, "max_tokens": 1})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    nothing = httpx.get(f"{server.url}/v1/nothing")
    assert nothing.status_code == 404
    assert nothing.json()["error"]["code"] == "unknown_route"
    assert httpx.get(f"{server.url}/v1/models").json()["data"]
    assert httpx.get(f"{server.url}/models").json()["data"]

"""The HTTP application before its routes."""

from typing import Annotated

import httpx
import pytest
from fastapi import Query
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from openclaw_rl.server.api.app import Door, http_app, with_host_guard, with_plain_paths
from openclaw_rl.settings import ServerSettings
from openclaw_rl.web import bodies


@pytest.mark.parametrize(
    ("path", "served"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1//models", "/v1/models"),
        ("//v1/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("///v1///models//", "/v1/models"),
        ("/", "/"),
        ("//", "/"),
    ],
)
async def test_a_slash_too_many_changes_no_path(path: str, served: str) -> None:
    app = http_app()
    for known in ("/v1/models", "/"):
        app.add_route(known, lambda request: PlainTextResponse(request.url.path), methods=["POST"])
    transport = httpx.ASGITransport(with_plain_paths(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.request("POST", httpx.URL("http://localhost", raw_path=path.encode()))
    assert (reply.status_code, reply.text) == (200, served)


class Wanted(BaseModel):
    parts: list[int]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/of/x", b'{"parts": [1]}', "number", "invalid_body"),
        ("/of/1?limit=0", b'{"parts": [1]}', "limit", "invalid_body"),
        ("/of/1", b'{"parts": [1, "a"]}', "parts[1]", "invalid_body"),
        ("/of/1", b"{}", "parts", "invalid_body"),
        ("/of/1", b"[]", None, "invalid_json"),
        ("/of/1", b"", None, "invalid_json"),
        ("/of/1", b"{", None, "invalid_json"),
        ("/of/1", b'{"parts": "\xff"}', None, "invalid_json"),
        ("/of/1", b"[" * 50_000, None, "invalid_json"),
    ],
)
async def test_each_fault_of_a_request_names_its_field(path: str, body: bytes, param: str | None, code: str) -> None:
    app = http_app()

    @app.post("/of/{number}")
    async def route(number: int, wanted: Wanted, limit: Annotated[int, Query(ge=1)] = 1) -> None: ...

    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        reply = await client.post(path, content=body, headers=headers)
    error = reply.json()["error"]
    assert reply.status_code in (400, 422)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert param is None or param in error["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/messages/count_tokens", "/v1/responses"])
async def test_errors_before_a_route_have_the_form_of_its_api_too(path: str) -> None:
    server = ServerSettings()
    apps = {
        503: Door(server, "policy"),
        404: http_app(),
        413: bodies.bounded(http_app(), 2, but="/v1/trainer"),
        403: with_host_guard(http_app(), server),
    }
    for status, app in apps.items():
        host = "http://evil.example" if status == 403 else "http://localhost"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=host) as client:
            reply = await client.post(path, content=b"{}    ")
        assert reply.status_code == status
        if "messages" in path:
            assert (reply.json()["type"], set(reply.json()["error"])) == ("error", {"type", "message"})
        else:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

"""The HTTP application before its routes."""

import httpx
import pytest
from starlette.responses import PlainTextResponse

from openclaw_rl.server.api.app import http_app, with_plain_paths


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

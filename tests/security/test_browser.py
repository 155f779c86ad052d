"""A web page in a browser on the same machine can neither read from the server nor post to it."""

import pytest

PAGE = "https://evil.example"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/feedback",
        "/v1/wishes/1",
        "/v1/admin/train",
        "/v1/trainer/tip",
        "/healthz",
        "/v1/models",
    ],
)
@pytest.mark.parametrize("doors", ["keyed", "open_server"])
def test_cors_is_closed(request, doors, path):
    server = request.getfixturevalue(doors)
    headers = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    preflight = server.ask("OPTIONS", path, headers=headers)
    assert preflight.status_code >= 400
    method = "GET" if path in ("/healthz", "/v1/models") else "POST"
    plain = server.ask(method, path, headers={"Origin": PAGE}, content=b"{}")
    for reply in (preflight, plain):
        assert not [name for name in reply.headers if name.lower().startswith("access-control-")]


@pytest.mark.parametrize("origin", [PAGE, "null", "http://127.0.0.1:1", "http://localhost", "file://"])
def test_without_keys_no_page_may_post_a_chat_or_feedback(open_server, origin):
    """A simple request (text/plain) needs no preflight: its answer is hidden from the page, and its effect is not."""
    before = open_server.server.admin("/v1/admin/status")["counts"]["requests"]
    headers = {"Origin": origin, "Content-Type": "text/plain"}
    for path in ("/v1/chat/completions", "/chat/completions", "/v1/feedback", "/v1/wishes/1"):
        reply = open_server.ask(
            "POST", path, headers=headers, content=b'{"messages": [{"role": "user", "content": "a"}]}'
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert open_server.server.admin("/v1/admin/status")["counts"]["requests"] == before


def test_without_keys_a_client_that_is_no_page_is_served(open_server):
    assert open_server.chat().status_code == 200
    assert open_server.chat("any-key").status_code == 200  # OpenClaw sends one
    own = open_server.server.url
    assert open_server.chat(headers={"Origin": own}).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "evil.example",
        "evil.example:30000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "localhost@evil.example",
        "",
        "127.0.0.1:80:80",
    ],
)
def test_a_name_that_was_made_to_resolve_here_is_refused(open_server, name):
    for path in ("/v1/chat/completions", "/v1/feedback", "/healthz", "/v1/models", "/v1/admin/status", "/v1/nothing"):
        reply = open_server.ask("POST", path, headers={"Host": name}, content=b"{}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "name", ["localhost", "LOCALHOST:30000", "127.0.0.1", "127.0.0.1:1", "[::1]:30000", "10.0.0.7:30000", "localhost."]
)
def test_addresses_and_localhost_are_names_of_ours(open_server, name):
    assert open_server.ask("GET", "/healthz", headers={"Host": name}).status_code == 200


def test_more_names_can_be_allowed_and_keys_are_a_door_of_their_own(keyed, host, tmp_path, engine_settings, doors_of):
    """Behind a reverse proxy, with keys, any name is allowed, because a page has no key."""
    assert keyed.chat("ann", headers={"Host": "chat.example"}).status_code == 200
    named = engine_settings | {"server.allowed_hosts": ["Host.Docker.Internal"]}
    with host.running(tmp_path, named) as server:
        doors = doors_of(server)
        assert doors.ask("GET", "/healthz", headers={"Host": "host.docker.internal:30000"}).status_code == 200
        assert doors.ask("GET", "/healthz", headers={"Host": "docker.internal"}).status_code == 403

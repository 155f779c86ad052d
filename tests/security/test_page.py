"""The page at `/`: every client may load the file, and the data in it needs the admin key."""

import time
from functools import partial

import pytest


@pytest.mark.parametrize("doors", ["keyed", "open_server"])
def test_the_page_is_served_without_a_key_and_holds_nothing(request, doors):
    server = request.getfixturevalue(doors)
    server.chat("ann", messages=[{"role": "user", "content": "a tale of 7 herons"}])
    for path, kind in (("/", "text/html"), ("/page/main.js", "text/javascript"), ("/page/base.css", "text/css")):
        reply = server.ask("GET", path)
        assert reply.status_code == 200
        assert reply.headers["content-type"] == f"{kind}; charset=utf-8"
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert (reply.headers["referrer-policy"], reply.headers["x-content-type-options"]) == ("no-referrer", "nosniff")
        assert reply.text == server.ask("GET", path, "admin").text
        for secret in (*server.keys.values(), "herons"):
            assert secret not in reply.text


@pytest.mark.parametrize("key", [None, "ann", "trainer", "wrong"])
def test_what_it_asks_for_needs_the_admin_key(keyed, key):
    for path in ("/v1/admin/status", "/v1/admin/history", "/v1/admin/versions/0"):
        assert keyed.ask("GET", path, key).status_code == 401
        assert keyed.ask("GET", path, "admin").status_code == 200


def test_history_is_what_curves_are_drawn_from(open_server):
    history = partial(open_server.server.admin, "/v1/admin/history")
    found = history()
    assert [(row["weight_version"], row["state"], row["metrics"]) for row in found["versions"]] == [(0, "serving", {})]
    said = [{"role": "user", "content": "a short tale"}]
    reply = open_server.chat(messages=said).json()["choices"][0]["message"]
    open_server.chat(messages=[*said, reply, {"role": "user", "content": "Thanks, that is perfect!"}])
    end = time.monotonic() + 120
    while [0, 1] not in history()["verdicts"]:
        assert time.monotonic() < end, "no verdict came"
        time.sleep(0.05)
    (at, version, seconds), *_ = history()["first_tokens"]
    assert (at > 0, version, seconds > 0) == (True, 0, True)
    assert history()["versions"][0]["batch"] is None


def test_the_state_names_its_parts(keyed):
    status = keyed.ask("GET", "/v1/admin/status", "admin").json()
    assert status["engine"] == {"kind": "url", "is_open": True}
    assert status["judge"] == {"kind": "rules"}
    assert status["trainer"] == {"kind": "external", "last_call_s": None}
    assert 0 < status["disk"]["ledger"] < status["disk"]["total"]


def test_history_is_bounded(keyed):
    for wrong in ("versions=0", "versions=1001", "verdicts=0", "verdicts=x"):
        assert keyed.ask("GET", f"/v1/admin/history?{wrong}", "admin").status_code in (400, 422)

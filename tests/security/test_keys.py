"""Chat keys, the admin key and the trainer token: each opens its own routes, and a request without a key opens none."""

import ast
import inspect
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest
from doors import ADMIN, CHAT, OPEN, READERS, TRAINER
from engine_processes import EngineProcess

import openclaw_rl
from openclaw_rl.settings import ApiKey
from openclaw_rl.web.auth import Keys, Secret


@pytest.mark.parametrize(("method", "path"), [*ADMIN, *TRAINER, *CHAT, *READERS])
def test_without_the_key_every_door_is_closed(keyed, method, path):
    for key in (None, "wrong", "sk-ann-5up3", "sk-ann-5up3r2", "SK-ANN-5UP3R"):
        reply = keyed.ask(method, path, key, json={})
        assert reply.status_code == 401, reply.text
        assert set(reply.json()["error"]) >= (
            {"message", "type"} if "messages" in path else {"message", "type", "code"}
        )


@pytest.mark.parametrize(
    ("doors", "strangers"),
    [
        (ADMIN, ("ann", "trainer")),
        (TRAINER, ("ann", "admin")),
        (CHAT, ("admin", "trainer")),
        (READERS, ("trainer",)),
    ],
)
def test_a_key_opens_its_own_doors_and_no_others(keyed, doors, strangers):
    for method, path in doors:
        for key in strangers:
            assert keyed.ask(method, path, key, json={}).status_code == 401, (path, key)


def test_each_key_opens_its_doors(keyed):
    assert keyed.chat("ann").status_code == keyed.chat("bob").status_code == 200
    assert keyed.ask("GET", "/v1/admin/status", "admin").status_code == 200
    assert keyed.ask("POST", "/v1/trainer/tip", "trainer").status_code == 200


def test_no_route_is_missing_from_these_lists(keyed):
    """A new route must be named above: behind a key, or open on purpose."""
    paths = keyed.ask("GET", "/openapi.json", "admin").json()["paths"]
    found = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    names = {"chatcmpl-1": "{turn_id}", "versions/0": "versions/{weight_version}", "wishes/1": "wishes/{wish_id}"}
    names |= {"episodes/e": "episodes/{episode_id}", "users/ann": "users/{user}", "engines/1": "engines/{number}"}

    def template(path: str) -> str:
        return next((path.replace(one, name) for one, name in names.items() if one in path), path)

    known = {(method, template(path)) for method, path in (*ADMIN, *TRAINER, *CHAT, *READERS)}
    assert found - known - OPEN == set()


def test_only_the_operator_takes_an_engine_out_and_never_the_last_one(
    host, tmp_path, engine_settings, key_settings, doors_of
):
    with ExitStack() as stack:
        stubs = [stack.enter_context(EngineProcess(tmp_path / f"engine{n}")) for n in range(2)]
        pool = {"engine.urls": [stub.url for stub in stubs], "engine.url": None}
        server = stack.enter_context(host.running(tmp_path / "pool", engine_settings | key_settings | pool))
        doors = doors_of(server)

        def engines():
            return doors.ask("GET", "/v1/admin/engines", "admin").json()["engines"]

        def drain(number, key, drained=True):
            return doors.ask("POST", f"/v1/admin/engines/{number}", key, json={"drained": drained})

        while not all(engine["is_in"] for engine in engines()):
            time.sleep(0.02)
        for key in (None, "ann", "trainer", "wrong"):
            assert drain(2, key).status_code == 401
        assert not any(engine["is_drained"] for engine in engines())
        assert drain(2, "admin").json()["is_drained"]
        for key in (None, "ann", "trainer"):
            assert drain(2, key, drained=False).status_code == 401
        last, unknown = drain(1, "admin"), drain(3, "admin")
        assert (last.status_code, last.json()["error"]["code"]) == (409, "last_engine")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "engine_not_found")
        assert [engine["is_drained"] for engine in engines()] == [False, True]
        assert doors.ask("GET", "/v1/admin/status", "admin").json()["engine"]["is_open"]


def test_a_server_with_one_engine_has_none_to_take_out(keyed):
    assert keyed.ask("GET", "/v1/admin/engines", "admin").json() == {"engines": []}
    refused = keyed.ask("POST", "/v1/admin/engines/1", "admin", json={"drained": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_pool")


@pytest.mark.parametrize(
    "header",
    [
        "sk-ann-5up3r",
        "Basic sk-ann-5up3r",
        "Bearer",
        "bearer\tsk-ann-5up3r",
        "Bearer sk-ann-5up3r sk-bob-5up3r",
    ],
)
def test_only_a_bearer_token_is_a_key(keyed, header):
    reply = keyed.ask("POST", "/v1/chat/completions", json={}, headers={"Authorization": header})
    assert reply.status_code == 401


def test_anthropics_header_is_a_key_of_its_own_routes_alone(keyed):
    count = {"messages": [{"role": "user", "content": "hi"}]}
    for path, status in (("/v1/messages/count_tokens", 200), ("/v1/chat/completions", 401), ("/v1/feedback", 401)):
        reply = keyed.ask("POST", path, json=count, headers={"X-Api-Key": "sk-ann-5up3r"})
        assert reply.status_code == status, path


def test_a_key_in_the_query_or_in_a_cookie_is_no_key(keyed):
    for kwargs in (
        {"params": {"api_key": "sk-ann-5up3r"}},
        {"headers": {"Cookie": "Authorization=Bearer sk-ann-5up3r"}},
    ):
        assert keyed.ask("POST", "/v1/chat/completions", json={}, **kwargs).status_code == 401


def test_a_user_cannot_rate_or_find_out_about_anothers_turn(keyed):
    session = f"private-{uuid.uuid4().hex}"
    reply = keyed.chat("ann", headers={"X-Session-Id": session})
    turn = reply.json()["id"]
    for target in ({"turn_id": turn}, {"session_id": session}):
        missing = {name: "no-such-thing" for name in target}
        theirs = keyed.ask("POST", "/v1/feedback", "bob", json={**target, "value": False})
        nothing = keyed.ask("POST", "/v1/feedback", "bob", json={**missing, "value": False})
        assert theirs.status_code == nothing.status_code == 404
        assert theirs.json()["error"]["code"] == nothing.json()["error"]["code"]
    own = keyed.ask("POST", "/v1/feedback", "ann", json={"turn_id": turn, "value": True})
    assert own.status_code == 200


def test_a_user_reads_and_changes_the_own_turns_alone(keyed):
    turn = keyed.chat("ann").json()["id"]
    assert turn in [row["turn_id"] for row in keyed.ask("GET", "/v1/turns", "ann").json()["turns"]]
    assert turn not in [row["turn_id"] for row in keyed.ask("GET", "/v1/turns?limit=1000", "bob").json()["turns"]]
    assert keyed.ask("GET", "/v1/turns?user=ann", "bob").status_code == 403
    for path in (f"/v1/turns/{turn}", f"/v1/turns/{turn}/tokens"):
        assert [keyed.ask("GET", path, key).status_code for key in ("ann", "admin", "bob")] == [200, 200, 404]
    assert keyed.ask("POST", f"/v1/turns/{turn}", "bob", json={"train": False}).status_code == 404
    assert keyed.ask("GET", f"/v1/outcomes?turn_id={turn}", "bob").json()["outcomes"] == []
    assert keyed.ask("POST", f"/v1/turns/{turn}", "ann", json={"train": False}).json()["reason"] == "opted_out"


def test_a_session_of_the_same_name_is_another_users_own(keyed):
    """Bob continues Ann's conversation under her session id, word for word: her turn stays unanswered."""
    session, asked = f"shared-{uuid.uuid4().hex}", [{"role": "user", "content": "what is the plan?"}]
    turn = keyed.chat("ann", messages=asked, headers={"X-Session-Id": session}).json()
    said = turn["choices"][0]["message"]
    spoken = [
        *asked,
        {"role": "assistant", "content": said["content"]},
        {"role": "user", "content": "no, that is wrong"},
    ]
    keyed.chat("bob", messages=spoken, headers={"X-Session-Id": session})
    record = keyed.ask("GET", f"/v1/turns/{turn['id']}", "admin").json()
    assert (record["state"], record["next_state"]) == ("served", None)
    keyed.chat("ann", messages=spoken, headers={"X-Session-Id": session})
    record = keyed.ask("GET", f"/v1/turns/{turn['id']}", "admin").json()
    assert record["next_state"] is not None


def test_a_user_cannot_end_anothers_session(keyed):
    session = f"open-{uuid.uuid4().hex}"
    turn = keyed.chat("ann", headers={"X-Session-Id": session}).json()["id"]
    for ending in ({"session_done": True}, {"headers": {"X-Session-Done": "1"}}):
        body = {"headers": {"X-Session-Id": session} | ending.pop("headers", {}), **ending}
        assert keyed.chat("bob", **body).status_code == 200
        assert keyed.ask("GET", f"/v1/turns/{turn}", "admin").json()["state"] == "served"
    keyed.chat("ann", headers={"X-Session-Id": session}, session_done=True)
    assert keyed.ask("GET", f"/v1/turns/{turn}", "admin").json()["reason"] == "no_next_state"


def test_no_list_of_a_chat_key_has_anothers_turns(keyed):
    """A filter on a session narrows the own turns; no filter widens them, and forgetting is the operator's."""
    session = f"mine-{uuid.uuid4().hex}"
    keyed.chat("ann", headers={"X-Session-Id": session})
    for query in ("", f"?session_id={session}", "?state=served", "?q=hello", "?trained_in=0"):
        rows = keyed.ask("GET", f"/v1/turns{query}", "bob").json()["turns"]
        assert {row["user"] for row in rows} <= {"bob"}, query
    assert keyed.ask("POST", "/v1/admin/forget", "ann", json={"user": "ann", "everything": True}).status_code == 401


def test_secrets_are_compared_in_one_place_and_in_constant_time():
    """No `==` on a secret: `web.auth` alone reads Authorization headers, and compares with `hmac.compare_digest`.

    The runner of agents is a client: the headers that it reads are its own.
    """
    package = Path(openclaw_rl.__file__).parent
    readers = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if not {"testing", "agents"} & set(file.relative_to(package).parts)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("headers.get")
        and node.args
        and ast.unparse(node.args[0]).strip("'\"").lower() == "authorization"
    }
    for reader in readers:
        source = (package / reader).read_text()
        assert (
            "caller(request.headers" in source or "opens(request.headers" in source or "caller(headers.get" in source
        ), reader
    for method in (Secret.opens, Keys.caller):
        source = inspect.getsource(method)
        assert "compare_digest" in source
        assert "==" not in source


def test_all_chat_keys_are_compared_whichever_fits(monkeypatch):
    seen = []
    import hmac

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append((len(a), len(b))) or real(a, b))
    keys = Keys([ApiKey(key="a"), ApiKey(key="b" * 50), ApiKey(key="c")])
    assert keys.caller("Bearer a").user == "user"
    assert seen == [(32, 32)] * 3
    with pytest.raises(ValueError, match="empty"):
        Secret("")

"""Users of `openclaw-rl keys`: every route with each kind of key, and nothing of one user in an answer to another."""

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from doors import ADMIN, CHAT, READERS, TRAINER
from harness.host import Host, Server

from openclaw_rl.data_dir import DataDir
from openclaw_rl.web.user_keys import UserKeys

SECRET = "the password of the blue boat is barnacle"
KINDS = {
    "ann": (CHAT, READERS),
    "untrained": (CHAT, READERS),
    "admin": (ADMIN, READERS),
    "trainer": (TRAINER,),
    "revoked": (),
    "rotated": (),
    "unknown": (),
}


@pytest.fixture(scope="module")
def family(
    host: Host,
    tmp_path_factory: pytest.TempPathFactory,
    engine_settings: dict[str, Any],
    key_settings: dict[str, Any],
    doors_of: Callable[[Server], Any],
) -> Iterator[Any]:
    """A server with users in its data directory, and no key in its settings but the operator's."""
    folder = tmp_path_factory.mktemp("family")
    users = UserKeys(DataDir.prepare(folder / "data").users)
    keys = {name: users.add(name, train=name != "untrained", now=1.0) for name in ("ann", "bob", "untrained")}
    keys["revoked"] = users.add("old", train=True, now=1.0)
    settings = {name: value for name, value in key_settings.items() if name != "server.api_keys"}
    with host.running(folder, engine_settings | settings) as server:
        doors = doors_of(server)
        assert doors.ask("GET", "/v1/turns", keys["revoked"]).status_code == 200
        users.revoke("old")
        keys["rotated"], keys["ann"] = keys["ann"], users.rotate("ann", now=2.0)
        yield replace(doors, keys={**doors.keys, **keys, "unknown": "sk-orl-unknown"})


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_key_at_every_route(family: Any, kind: str) -> None:
    """A route is 401 for a key that is not for it, before a byte of the body counts."""
    own = {door for doors in KINDS[kind] for door in doors}
    for method, path in (*ADMIN, *CHAT, *READERS, *TRAINER):
        reply = family.ask(method, path, kind, json={})
        assert (reply.status_code == 401) == ((method, path) not in own), (method, path, reply.text)


def test_an_untrained_users_turn_is_served_and_opted_out(family: Any) -> None:
    reply = family.chat("untrained")
    assert reply.status_code == 200
    record = family.ask("GET", f"/v1/turns/{reply.json()['id']}", "untrained").json()
    assert (record["request"]["scope"]["user"], record["reason"]) == ("untrained", "opted_out")


def _talk(doors: Any, key: str, session: str) -> list[str]:
    """Two turns of a user, a verdict, a wish in words, an evaluated episode and a background request."""
    asked = [{"role": "user", "content": f"remember: {SECRET}"}]
    first = doors.chat(key, messages=asked, headers={"X-Session-Id": session}).json()
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    more = [*asked, said, {"role": "user", "content": f"wrong! {SECRET}"}]
    second = doors.chat(key, messages=more, headers={"X-Session-Id": session}).json()
    good = {"turn_id": second["id"], "value": True, "comment": f"always say {SECRET}"}
    assert doors.ask("POST", "/v1/feedback", key, json=good).status_code == 200
    opened = {"episode_id": f"of-{session}", "task": f"task of {session}", "split": "eval"}
    assert doors.ask("POST", "/v1/episodes", key, json=opened).status_code == 201
    doors.chat(key, headers={"X-Session-Id": session, "X-Turn-Type": "side"})
    return [first["id"], second["id"]]


def _seen(doors: Any, key: str, ids: Mapping[str, str]) -> dict[str, Any]:
    """Everything that a chat key can ask, the ids of `ids` among it; ids that the caller named itself are masked."""
    turn, session = ids["turn"], ids["session"]
    reads = [
        *("/healthz", "/v1/models", "/models", "/v1/models/policy", "/v1/wishes", "/v1/wishes/1", "/v1/episodes"),
        "/v1/policy",
        *(f"/v1/turns{query}" for query in ("", "?limit=1", f"?session_id={session}", "?weight_version=0", "?q=boat")),
        *(f"/v1/turns?state={state}" for state in ("served", "paired", "judged", "sampled")),
        *(f"/v1/turns?{name}" for name in ("verdict=1", "source=rules", "source=feedback", "trained_in=0")),
        *(f"/v1/turns/{turn}{part}" for part in ("", "/state", "/tokens")),
        *(f"/v1/outcomes?turn_id={turn}", f"/v1/episodes/of-{session}"),
        *(f"/v1/episodes?{name}" for name in ("state=running", f"task=task of {session}", f"group=of-{session}")),
    ]
    writes: list[tuple[str, str, Any]] = [
        ("POST", "/v1/feedback", {"turn_id": turn, "value": True}),
        ("POST", "/v1/feedback", {"session_id": session, "value": True}),
        ("POST", f"/v1/turns/{turn}", {"train": False}),
        ("POST", f"/v1/turns/{turn}", {"verdict": 1}),
        ("POST", "/v1/wishes/1", {"practise": False}),
        ("DELETE", "/v1/wishes/1", None),
        ("POST", f"/v1/episodes/of-{session}/outcome", {"reward": 1}),
        ("POST", f"/v1/episodes/of-{session}/abort", {"reason": "x"}),
        ("POST", f"/v1/episodes/of-{session}/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        *(
            ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": f"/rl {verb}"}]})
            for verb in ("status", "wishes", "good", "undo")
        ),
    ]
    found = {}
    for method, path, body in [("GET", path, None) for path in reads] + writes:
        reply = doors.ask(method, path, key, **({} if body is None else {"json": body}))
        found[f"{method} {path} {body}"] = _answer(reply)
    return {_masked(name, ids): _masked(answer, ids) for name, answer in found.items()}


def _answer(reply: httpx.Response) -> str:
    own = {"date", "server", "x-request-id", "request-id"}
    headers = sorted((name, value) for name, value in reply.headers.items() if name not in own)
    text = re.sub(r'"(id|created|request_id)":("[^"]*"|\d+)', r'"\1":…', reply.text)
    return f"{reply.status_code} {headers} {text}"


def _masked(text: str, ids: Mapping[str, str]) -> str:
    for name, value in ids.items():
        text = text.replace(value, f"<{name}>")
    return re.sub(r"'content-length', '\d+'", "", text)


def test_nothing_that_another_user_does_shows_in_any_answer(family: Any) -> None:
    """Bob asks all that he can, before and after Ann has chatted; with her ids, and with ids that nobody has."""
    _talk(family, "bob", f"bobs-{uuid.uuid4().hex}")
    session = f"anns-{uuid.uuid4().hex}"
    nobody = {"turn": f"chatcmpl-{uuid.uuid4().hex}", "session": f"none-{uuid.uuid4().hex}"}
    before = _seen(family, "bob", nobody)
    first, _ = _talk(family, "ann", session)
    anns = {"turn": first, "session": session}
    assert _seen(family, "bob", anns) == before == _seen(family, "bob", nobody)
    assert SECRET in family.ask("GET", f"/v1/turns/{first}", "ann").text
    assert family.ask("GET", f"/v1/episodes/of-{session}", "ann").status_code == 200


def test_the_places_of_a_users_list_lead_on_and_count_no_other_turns(family: Any) -> None:
    mine = []
    for _ in range(3):
        mine.append(family.chat("bob").json()["id"])
        family.chat("ann")
    found: list[str] = []
    places: list[int] = []
    query = "?limit=1"
    while len(found) < 3:
        page = family.ask("GET", f"/v1/turns{query}", "bob").json()
        found += [row["turn_id"] for row in page["turns"]]
        assert page["looked_at"] <= 2
        places.append(page["next"])
        query = f"?limit=1&before={page['next']}"
    assert found == mine[::-1]
    assert max(places) < 2**53, "a browser's number"
    operators = family.ask("GET", "/v1/turns?limit=1&user=bob", "admin").json()["next"]
    assert operators < 10_000 < min(places), "the operator's place is a row; a user's tells nothing"
    assert family.ask("GET", f"/v1/turns?before={places[0]}", "ann").status_code == 200


def test_no_user_finds_a_prefix_in_the_cache_of_another(family: Any) -> None:
    """The engine keeps prefixes apart by `extra_key`: neither `cached_tokens` nor time tells of another's prompt."""
    asked = [{"role": "user", "content": f"the same words {uuid.uuid4().hex}"}]
    for key in ("ann", "bob", "ann"):
        assert family.chat(key, messages=asked).status_code == 200
    keys = [call.extra_key for call in family.stubs.calls[-3:]]
    assert keys[0] == keys[2] != keys[1]
    assert not {"ann", "bob"} & set(keys[0].split("-") + keys[1].split("-")), "no name goes to the engine"
    assert all(key.startswith("v0-") for key in keys)


def test_keys_are_nowhere_in_the_data_directory(family: Any) -> None:
    for file in Path(family.server.data_dir).rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            for name in ("ann", "bob", "untrained", "revoked", "rotated"):
                assert family.keys[name].encode() not in content, (file, name)
    assert not any(family.keys[name] in family.server.log for name in ("ann", "bob", "revoked"))


def test_the_operators_list_of_users_has_figures_and_no_words(family: Any) -> None:
    _talk(family, "ann", f"figures-{uuid.uuid4().hex}")
    reply = family.ask("GET", "/v1/admin/users", "admin")
    rows = {row["user"]: row for row in reply.json()["users"]}
    assert {"ann", "bob", "untrained"} <= rows.keys()
    assert rows["ann"]["requests"] >= 3
    assert rows["ann"]["tokens"] > 0
    assert (rows["ann"]["has_key"], rows["untrained"]["train"]) == (True, False)
    assert SECRET not in reply.text
    assert family.ask("GET", "/v1/admin/users/ann/wishes", "admin").json() == {"wishes": []}

"""A policy for each user: no key reads, rates, steers or chats under the policy of another.

A real server, with a trainer without a model, over a fake engine that notes each request. Ann's and Bob's policies have
learned one version each before the tests begin.
"""

import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from breaking import words_of
from browsing import Site, listening, settings_of
from harness.host import Host
from harness.model import Vocabulary

from openclaw_rl.engines.version_keys import adapter_name
from openclaw_rl.testing import FakeEngine, stub_app

KEYS = {"ann": "sk-ann-5up3r", "bob": "sk-bob-5up3r", "new": "sk-new-5up3r", "silent": "sk-silent-5up3r"}


@dataclass(frozen=True)
class House:
    site: Site
    http: httpx.Client

    def ask(self, method: str, path: str, key: str | None, **kwargs: Any) -> httpx.Response:
        given = self.site.admin_key if key == "admin" else KEYS.get(key or "", key)
        headers = dict(kwargs.pop("headers", {})) | ({} if given is None else {"Authorization": f"Bearer {given}"})
        return self.http.request(method, self.site.server.url + path, headers=headers, **kwargs)

    def chat(self, user: str, text: str = "hello", **more: Any) -> httpx.Response:
        headers = {"X-Session-Id": more.pop("session", uuid.uuid4().hex)}
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, **more}
        return self.ask("POST", "/v1/chat/completions", user, json=body, headers=headers)

    def serving(self, user: str) -> int:
        return int(self.ask("GET", "/v1/policy", user).json()["serving"])

    def teach(self, user: str) -> int:
        """Train the user's policy once, and return its new version."""
        before = int(self.chat(user).headers["x-weight-version"])
        for number in range(2):
            turn = self.chat(user, f"of {user} {number}").json()["id"]
            said = {"turn_id": turn, "value": not number, "comment": f"{user} wants it shorter."}
            assert self.ask("POST", "/v1/feedback", user, json=said).status_code == 200
        while (now := self.serving(user)) == before:
            time.sleep(0.02)
        return now


@pytest.fixture(scope="module")
def house(host: Host, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    vocabulary, folder = Vocabulary.of(model_folder), tmp_path_factory.mktemp("house")
    engine = FakeEngine(policy=words_of(vocabulary), context_length=4096)
    settings: dict[str, Any] = {
        "policies__mode": "per_user",
        "policies__loaded": 2,
        "practice__enabled": False,
        "server__api_keys": [{"key": key, "user": user} for user, key in KEYS.items()],
    }
    with listening(stub_app(engine)) as (url, loop), httpx.Client(timeout=120, trust_env=False) as http:
        with host.running(folder, settings_of(url, folder, **settings)) as server:
            house = House(Site(server, engine, loop, vocabulary), http)
            for user in ("ann", "bob"):
                house.teach(user)
            yield house


def test_a_chat_runs_under_the_adapter_of_its_own_user_alone(house: House) -> None:
    own = {user: house.serving(user) for user in ("ann", "bob")}
    assert len(set(own.values())) == 2
    for user in ("ann", "bob", "ann"):
        reply = house.chat(user)
        call = house.site.engine.calls[-1]
        assert (reply.headers["x-weight-version"], call.lora_path) == (str(own[user]), adapter_name(own[user]))


def test_no_prefix_of_one_policy_is_found_under_another(house: House) -> None:
    words = f"the same words {uuid.uuid4().hex}"
    salts = []
    for user in ("ann", "bob", "new"):
        house.chat(user, words)
        salts.append(house.site.engine.calls[-1].extra_key)
    assert len(set(salts)) == 3
    assert not {user for user in KEYS if any(user in re.split(r"\W", str(salt)) for salt in salts)}


@pytest.mark.parametrize("form", ["policy@v{}", "policy-v{}", "{}@v{}"])
def test_the_version_of_another_is_no_model(house: House, form: str) -> None:
    """Also under the name that the adapter has on the engine; the answer is that for a version that nobody has."""
    name = house.ask("GET", "/v1/models", "ann").json()["data"][0]["id"]
    number = house.serving("ann")
    bobs, nobodys = (form.format(*([name] if form[0] == "{" else []), n) for n in (number, 999))
    calls = len(house.site.engine.calls)
    answers = [house.chat("bob", model=model) for model in (bobs, nobodys)]
    assert [reply.status_code for reply in answers] == [404, 404]
    assert answers[0].text.replace(str(number), "N") == answers[1].text.replace("999", "N")
    assert len(house.site.engine.calls) == calls, "no token of it was sampled"
    assert house.chat("ann", model=bobs).status_code == 200


def test_a_field_of_the_engine_names_no_adapter(house: House) -> None:
    anns = adapter_name(house.serving("ann"))
    for field in ("lora_path", "extra_key", "policy"):
        reply = house.chat("bob", **{field: anns})
        call = house.site.engine.calls[-1]
        assert reply.status_code == 400 or call.lora_path == adapter_name(house.serving("bob")), field
        assert call.extra_key != anns


def test_a_user_sees_and_steers_the_own_policy(house: House) -> None:
    state = house.ask("GET", "/v1/policy", "ann").json()
    numbers = [row["weight_version"] for row in state["versions"]]
    assert (state["policy"], state["serving"], state["tip"]) == ("user:ann", numbers[-1], numbers[-1])
    assert {row["policy"] for row in state["versions"]} == {"user:ann"}
    assert not {"folder", "sha256", "report_json"} & set(state["versions"][-1])

    pinned = house.ask("POST", "/v1/policy/pin", "ann", json={"weight_version": numbers[0]}).json()
    assert (pinned["pinned"], pinned["serving"]) == (numbers[0], numbers[0])
    assert house.chat("ann").headers["x-weight-version"] == str(numbers[0])
    assert house.ask("POST", "/v1/policy/pin", "ann", json={"weight_version": None}).json()["pinned"] is None
    while house.serving("ann") != numbers[-1]:
        time.sleep(0.02)

    paused = house.ask("POST", "/v1/policy/learning", "ann", json={"on": False}).json()
    assert (paused["learning"], house.ask("GET", "/v1/policy", "bob").json()["learning"]) == (False, True)
    assert "paused" in house.chat("ann", "/rl status").json()["choices"][0]["message"]["content"]
    assert house.ask("POST", "/v1/policy/learning", "ann", json={"on": True}).json()["learning"] is True

    assert house.ask("POST", "/v1/policy/rollback", "ann", json={}).json()["serving"] == numbers[0]
    assert house.chat("ann").headers["x-weight-version"] == str(numbers[0])
    reply = house.ask("POST", "/v1/policy/rollback", "ann", json={})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "nothing_to_roll_back")
    house.teach("ann")


def test_no_act_of_a_key_reaches_the_policy_of_another(house: House) -> None:
    anns = [row["weight_version"] for row in house.ask("GET", "/v1/policy", "ann").json()["versions"]]
    turn = house.chat("ann", "a turn of ann").json()["id"]
    before = house.ask("GET", "/v1/policy", "ann").json()
    acts: list[Callable[[Any], tuple[str, str, Any]]] = [
        lambda number: ("POST", "/v1/policy/rollback", {"to": number}),
        lambda number: ("POST", "/v1/policy/pin", {"weight_version": number}),
    ]
    for act in acts:
        for number in anns:
            of_ann, of_nobody = (house.ask(m, p, "bob", json=body) for m, p, body in (act(number), act(999)))
            assert (of_ann.status_code, of_nobody.status_code) == (404, 404)
            assert of_ann.text.replace(str(number), "N") == of_nobody.text.replace("999", "N")
    for method, path, body in (
        ("POST", "/v1/policy/learning", {"on": False, "policy": "user:ann"}),
        ("POST", "/v1/policy/rollback", {"policy": "user:ann"}),
        ("POST", "/v1/policy/pin", {"weight_version": None, "policy": "user:ann"}),
    ):
        assert house.ask(method, path, "bob", json=body).status_code == 422
    assert house.ask("GET", "/v1/policy?policy=user:ann", "bob").json()["policy"] == "user:bob"
    for path in ("status", "history", "policies", f"versions/{anns[-1]}", "rollback", "pin", "learning"):
        method = "POST" if path in ("rollback", "pin", "learning") else "GET"
        assert house.ask(method, f"/v1/admin/{path}", "bob", json={}).status_code == 401
    assert house.ask("POST", "/v1/feedback", "bob", json={"turn_id": turn, "value": False}).status_code == 404
    assert house.ask("GET", f"/v1/turns/{turn}", "bob").status_code == 404
    assert house.ask("POST", f"/v1/turns/{turn}", "bob", json={"verdict": -1}).status_code == 404
    assert house.ask("GET", f"/v1/turns?trained_in={anns[-1]}", "bob").json()["turns"] == []
    assert house.ask("GET", "/v1/policy", "ann").json() == before


def test_nothing_that_another_policy_learns_shows_to_a_user(house: House) -> None:
    paths = ("/v1/policy", "/v1/models", "/v1/wishes", "/v1/turns")

    def seen() -> list[str]:
        texts = [house.ask("GET", path, "bob").text for path in paths]
        said = house.chat("bob", "/rl status", session="of-bob").json()["choices"][0]["message"]["content"]
        return [str(house.ask("GET", "/healthz", "bob").json()["weight_version"]), *texts, said]

    before = seen()
    house.teach("ann")
    house.ask("POST", "/v1/policy/rollback", "ann", json={})
    house.ask("POST", "/v1/policy/learning", "ann", json={"on": False})
    assert seen() == before
    house.ask("POST", "/v1/policy/learning", "ann", json={"on": True})
    house.teach("ann")


def test_a_user_without_a_chat_has_no_policy_yet(house: House) -> None:
    reply = house.ask("GET", "/v1/policy", "silent")  # no other test chats as this user
    assert reply.status_code == 404
    assert "first chat" in reply.json()["error"]["message"]
    house.chat("silent")
    assert house.ask("GET", "/v1/policy", "silent").json()["policy"] == "user:silent"
    assert house.ask("GET", "/v1/policy", "wrong").status_code == 401


def test_the_operator_names_the_policy_and_gets_figures_and_no_words(house: House) -> None:
    rows = {row["policy"]: row for row in house.ask("GET", "/v1/admin/policies", "admin").json()["policies"]}
    assert {"policy", "user:ann", "user:bob"} <= rows.keys()
    anns = house.ask("GET", "/v1/admin/status?policy=user:ann", "admin").json()
    assert (anns["policy"], anns["serving"], anns["policies"]) == ("user:ann", house.serving("ann"), len(rows))
    assert {row["policy"] for row in anns["versions"]} == {"user:ann"}
    shared = house.ask("GET", "/v1/admin/status", "admin").json()
    assert (shared["policy"], shared["serving"]) == ("policy", 0)
    history = house.ask("GET", "/v1/admin/history?policy=user:ann", "admin").json()
    assert {row["policy"] for row in history["versions"]} == {"user:ann"}
    assert all(version != house.serving("bob") for version, _ in history["verdicts"])
    unknown = house.ask("GET", "/v1/admin/status?policy=user:nobody", "admin")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "policy_not_found")
    assert "user:ann" in unknown.json()["error"]["message"]
    for path in ("rollback", "pin", "learning"):
        body = {"policy": "user:nobody"} | {"pin": {"weight_version": None}, "learning": {"on": True}}.get(path, {})
        assert house.ask("POST", f"/v1/admin/{path}", "admin", json=body).status_code == 404
    mixed = {"policy": "user:ann", "weight_version": house.serving("bob")}
    assert house.ask("POST", "/v1/admin/pin", "admin", json=mixed).status_code == 404

    text = house.ask("GET", "/v1/admin/policies", "admin").text + house.ask("GET", "/v1/admin/users", "admin").text
    assert "shorter" not in text
    listed = house.ask("GET", "/v1/turns", "admin").json()["turns"]
    assert {(row["asked"], row["said"]) for row in listed} == {("", "")}
    assert {row["user"] for row in listed} >= {"ann", "bob"}
    named = house.ask("GET", "/v1/turns?user=ann", "admin").json()["turns"]
    assert any(row["asked"].startswith("of ann") for row in named)
    assert house.ask("GET", "/v1/turns?q=ann", "admin").status_code == 400
    assert house.ask("GET", "/v1/turns?q=ann&user=ann", "admin").status_code == 200


def test_the_operator_steers_one_policy_and_leaves_the_others(house: House) -> None:
    bobs = house.ask("GET", "/v1/policy", "bob").json()
    serving = house.serving("ann")
    done = house.ask("POST", "/v1/admin/pin", "admin", json={"policy": "user:ann", "weight_version": serving}).json()
    assert done == {"policy": "user:ann", "pinned": serving, "serving": serving}
    paused = house.ask("POST", "/v1/admin/learning", "admin", json={"policy": "user:ann", "on": False}).json()
    assert (paused["learning"], paused["policy"]) == (False, "user:ann")
    back = house.ask("POST", "/v1/admin/rollback", "admin", json={"policy": "user:ann"}).json()
    assert (back["policy"], back["serving"]) == ("user:ann", house.serving("ann"))
    assert back["serving"] < serving
    assert house.ask("GET", "/v1/policy", "ann").json()["pinned"] == back["serving"], "the pin moves along"
    assert house.ask("GET", "/v1/policy", "bob").json() == bobs
    for path, body in (("pin", {"weight_version": None}), ("learning", {"on": True})):
        assert house.ask("POST", f"/v1/admin/{path}", "admin", json={"policy": "user:ann"} | body).status_code == 200

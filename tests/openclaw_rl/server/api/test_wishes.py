"""`/v1/wishes` over a real ledger: a user sees and changes the own wishes alone."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from practising import corrected

from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.server.api.app import http_app
from openclaw_rl.server.api.wishes import build_wishes_router
from openclaw_rl.settings import ApiKey, TrainingSettings
from openclaw_rl.types import WishMeasure
from openclaw_rl.web.auth import Keys


@dataclass
class Api:
    client: httpx.AsyncClient
    ledger: Ledger

    async def ask(self, method: str, path: str = "/v1/wishes", key: str | None = "key-ann", **body: Any) -> Any:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.client.request(method, path, headers=headers, json=body or None)

    async def wish(self, text: str = "shorter", *, user: str = "ann", session: str = "s") -> str:
        await corrected(self.ledger, text, user=user, session=session)
        return f"/v1/wishes/{(await self.ledger.wishes(user=user))[-1].wish_id}"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    keys = Keys([ApiKey(key="key-ann", user="ann"), ApiKey(key="key-bob", user="bob")])
    ledger = await Ledger.open(
        tmp_path / "l.sqlite", identity=Identity("base", "tokenizer", "tiny"), training=TrainingSettings()
    )
    app = http_app()
    app.include_router(build_wishes_router(ledger, keys, aim=1.3))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield Api(client, ledger)
    assert await ledger.audit(is_deep=True) == []
    await ledger.aclose()


async def test_the_list_has_the_words_the_turns_and_what_became_of_them(api):
    await api.wish("Shorter, please!")
    path = await api.wish("shorter")
    (wish,) = await api.ledger.wishes()
    await api.ledger.record_measures([WishMeasure(wish.wish_id, 0, 0.65, 0.2)])
    (row,) = (await api.ask("GET")).json()["wishes"]
    assert (await api.ask("GET", path)).json() == row
    known = ("text", "state", "learned", "learned_share", "aim", "kl", "practised", "updates", "is_general", "rests")
    assert {name: row[name] for name in known} == {
        "text": "shorter",
        "state": "active",
        "learned": pytest.approx(0.5),
        "learned_share": 0.65,
        "aim": 1.3,
        "kl": 0.2,
        "practised": 0,
        "updates": 0,
        "is_general": False,
        "rests": None,
    }
    assert [source["text"] for source in row["sources"]] == ["Shorter, please!", "shorter"]
    assert row["wish_id"] == int(path.rpartition("/")[2])


async def test_a_source_that_is_held_back_is_named(api):
    for _ in range(4):
        path = await api.wish("shorter")
    row = (await api.ask("GET", path)).json()
    assert [source["is_held_back"] for source in row["sources"]] == [False, False, False, True]


async def test_a_wish_of_somebody_else_does_not_exist(api):
    path = await api.wish(user="bob", session="b")
    assert (await api.ask("GET")).json() == {"wishes": []}
    for method, body in (("GET", {}), ("DELETE", {}), ("POST", {"general": True})):
        answer = await api.ask(method, path, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "wish_not_found")
    assert (await api.ask("GET", path, key="key-bob")).json()["state"] == "active"


@pytest.mark.parametrize("key", [None, "key-eve"])
async def test_without_a_key_nothing_is_told(api, key):
    path = await api.wish()
    for method, where in (("GET", "/v1/wishes"), ("GET", path), ("DELETE", path), ("POST", path)):
        body = {"general": True} if method == "POST" else {}
        assert (await api.ask(method, where, key=key, **body)).status_code == 401
    assert (await api.ledger.wishes())[0].state == "active"


async def test_a_wish_is_removed_and_practised_again(api):
    path = await api.wish()
    removed = (await api.ask("DELETE", path)).json()
    assert (removed["state"], removed["reason"]) == ("removed", "its user withdrew it")
    assert (await api.ask("POST", path, practise=True)).json()["state"] == "active"
    assert (await api.ask("POST", path, practise=False)).json()["state"] == "removed"


async def test_a_wish_is_said_to_be_general(api):
    path = await api.wish()
    assert (await api.ask("POST", path, general=True)).json()["is_general"] is True
    assert (await api.ask("POST", path, general=False)).json()["is_general"] is False


async def test_a_superseded_wish_cannot_be_practised_again(api):
    path = await api.wish("shorter")
    await api.wish("longer")
    answer = await api.ask("POST", path, practise=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "wish_over")
    assert "asks for the opposite: length" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("body", "status"), [({"genral": True}, 422), ({"general": "maybe"}, 422)])
async def test_a_bad_body_is_told_and_changes_nothing(api, body, status):
    path = await api.wish()
    assert (await api.ask("POST", path, **body)).status_code == status
    empty = await api.client.post(path, json={}, headers={"authorization": "Bearer key-ann"})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "general")
    assert (await api.ask("GET", "/v1/wishes/x")).status_code == 422
    assert (await api.ledger.wishes())[0].is_general is False

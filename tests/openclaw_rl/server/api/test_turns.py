"""`/v1/turns*` and `/v1/outcomes` over a real ledger: the operator sees every turn, a user the own ones alone."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from ledger import sample_of
from practising import corrected
from turns import make_request, make_turn, serve_turn

from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.server.api.app import http_app
from openclaw_rl.server.api.turns import TurnsDeps, build_turns_router
from openclaw_rl.settings import ApiKey, TrainingSettings
from openclaw_rl.types import Feedback, NextState, Verdict
from openclaw_rl.web.auth import Keys, Secret


class Numbers:
    def token_text(self, token: int) -> str:
        return f"<{token}>"


@dataclass
class Api:
    client: httpx.AsyncClient
    ledger: Ledger
    woken: list[None] = field(default_factory=list)

    async def ask(self, path: str, key: str | None = "key-ann", body: Any = None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.client.request("GET" if body is None else "POST", path, headers=headers, json=body)

    async def turn(self, name: str, *, user: str = "ann", text: str = "q") -> str:
        return await serve_turn(self.ledger, make_request(name, user=user, text=text), make_turn(name))


async def opened(folder: Path, keys: list[ApiKey]) -> AsyncIterator[Api]:
    ledger = await Ledger.open(
        folder / "l.sqlite", identity=Identity("base", "tokenizer", "tiny"), training=TrainingSettings()
    )
    app, woken = http_app(), []
    app.include_router(
        build_turns_router(
            TurnsDeps(ledger, Keys(keys), Secret("key-admin"), Numbers(), on_judged=lambda: woken.append(None))
        )
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield Api(client, ledger, woken)
    assert await ledger.audit(is_deep=True) == []
    await ledger.aclose()


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async for api in opened(tmp_path, [ApiKey(key="key-ann", user="ann"), ApiKey(key="key-bob", user="bob")]):
        yield api


@pytest.fixture
async def keyless(tmp_path: Path) -> AsyncIterator[Api]:
    async for api in opened(tmp_path, []):
        yield api


def names(reply: httpx.Response) -> list[str]:
    return [turn["turn_id"] for turn in reply.json()["turns"]]


async def test_a_user_lists_the_own_turns_and_the_operator_all(api):
    await api.turn("a", user="ann")
    await api.turn("b", user="bob")
    assert names(await api.ask("/v1/turns")) == ["a"]
    assert names(await api.ask("/v1/turns", "key-bob")) == ["b"]
    assert names(await api.ask("/v1/turns", "key-admin")) == ["b", "a"]
    assert names(await api.ask("/v1/turns?user=ann", "key-admin")) == ["a"]
    for path in ("/v1/turns/b", "/v1/turns/b/tokens", "/v1/turns/b/state", "/v1/turns/nothing"):
        assert (await api.ask(path)).status_code == 404
    assert (await api.ask("/v1/turns?user=bob")).status_code == 403
    for key in (None, "key-carl"):
        assert (await api.ask("/v1/turns", key)).status_code == 401


async def test_without_chat_keys_a_list_of_turns_needs_the_admin_key(keyless):
    await keyless.turn("a", user="user")
    for path in ("/v1/turns", "/v1/turns/a", "/v1/turns/a/tokens", "/v1/turns/a/state"):
        assert (await keyless.ask(path, None)).status_code == 401
        assert (await keyless.ask(path, "key-admin")).status_code == 200
    assert (await keyless.ask("/v1/turns/a", None, {"verdict": 1})).status_code == 401
    assert (await keyless.ask("/v1/outcomes?turn_id=a", None)).json()["outcomes"][0]["state"] == "served"


async def test_a_list_has_texts_and_goes_on(api):
    for name in "abc":
        await api.turn(name, text=f"question {name}")
    first = (await api.ask("/v1/turns?limit=2")).json()
    assert [(turn["turn_id"], turn["asked"], turn["said"]) for turn in first["turns"]] == [
        ("c", "question c", "a"),
        ("b", "question b", "a"),
    ]
    assert names(await api.ask(f"/v1/turns?limit=2&before={first['next']}")) == ["a"]
    assert names(await api.ask("/v1/turns?q=Question+b&practice=false&weight_version=0")) == ["b"]
    for wrong in ("verdict=2", "before=-1", "colour=red", "limit=0", "trained_in=x"):
        assert (await api.ask(f"/v1/turns?{wrong}")).status_code == 422, wrong


async def test_the_tokens_of_a_reply_have_the_terms_of_their_credit(api):
    turn_id = await corrected(api.ledger, "shorter")
    found = (await api.ask(f"/v1/turns/{turn_id}/tokens")).json()
    assert (found["reward"], found["has_gap"]) == (None, True)
    assert found["tokens"][0] == {
        "text": "<10>",
        "log_prob": -0.5,
        "weight_version": 0,
        "is_trained": True,
        "gap": 0.0,
    }
    await api.turn("plain")
    found = (await api.ask("/v1/turns/plain/tokens")).json()
    assert (found["has_gap"], [token["gap"] for token in found["tokens"]]) == (False, [None, None])


async def test_a_verdict_is_overridden_as_its_users_feedback(api):
    await api.turn("a")
    await api.ledger.pair("a", NextState((Message(role="user", content="ok"),)), by_request_id="b")
    await api.ledger.record_verdict("a", Verdict(1, (1,), "rules", "thanks"))
    answer = (await api.ask("/v1/turns/a", "key-admin", {"verdict": -1})).json()
    assert answer == {"turn_id": "a", "effect": "judged", "state": "judged", "reason": None}
    record = (await api.ask("/v1/turns/a")).json()
    assert (record["verdict"]["value"], record["verdict"]["source"]) == (-1, "feedback")
    assert len(api.woken) == 1
    assert (await api.ask("/v1/turns/a", "key-bob", {"verdict": 1})).status_code == 404
    (found,) = (await api.ask("/v1/outcomes?turn_id=a")).json()["outcomes"]
    assert (found["feedback"], found["source"], found["is_operators"]) == (-1, "feedback", True)
    assert (await api.ask("/v1/turns/a", "key-ann", {"verdict": 0})).status_code == 200
    (found,) = (await api.ask("/v1/outcomes?turn_id=a")).json()["outcomes"]
    assert (found["feedback"], found["source"], found["is_operators"]) == (0, "feedback", False)


async def test_a_turn_is_left_out_until_a_trainer_has_it(api):
    await api.turn("a")
    answer = (await api.ask("/v1/turns/a", "key-ann", {"train": False})).json()
    assert (answer["state"], answer["reason"]) == ("dropped", "opted_out")
    (found,) = (await api.ask("/v1/outcomes?turn_id=a")).json()["outcomes"]
    assert found["detail"] == "left out by its user"
    again = await api.ask("/v1/turns/a", "key-ann", {"train": False})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "turn_is_over")
    turn = make_turn("b")
    await serve_turn(api.ledger, make_request("b"), turn)
    await api.ledger.pair("b", NextState((Message(role="user", content="ok"),)), by_request_id="c")
    await api.ledger.record_verdict("b", Verdict(1, (1,), "rules"))
    await api.ledger.record_sample(sample_of(turn, (1, 2)))
    assert await api.ledger.lease(trainer="test", now=True) is not None
    refused = await api.ask("/v1/turns/b", "key-admin", {"train": False})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "turn_is_leased")
    assert "a trainer has turn b" in refused.json()["error"]["message"]


async def test_a_turn_that_is_left_out_takes_the_reply_written_in_its_place_with_it(api):
    await api.turn("a")
    said = Feedback("f", "a", 1.0, demonstration="better")
    written = (await api.ledger.record_feedback(said, user="ann", demonstration=(1, 2))).demonstration_id
    assert (await api.ask(f"/v1/turns/{written}/state")).json() == {
        "state": "sampled",
        "events": 1,
        "feedback": 0,
        "demonstration_of": "a",
    }
    assert (await api.ask(f"/v1/turns/{written}/tokens")).json()["is_demonstration"]
    await api.ask("/v1/turns/a", "key-admin", {"train": False})
    (found,) = (await api.ask("/v1/outcomes?turn_id=a")).json()["outcomes"]
    assert (found["reason"], found["demonstration"]["reason"]) == ("opted_out", "opted_out")
    assert await api.ledger.lease(trainer="test", now=True) is None


async def test_a_turn_is_read_without_its_tokens_and_its_state_tells_of_each_change(api):
    turn_id = await corrected(api.ledger, "shorter")
    found = (await api.ask(f"/v1/turns/{turn_id}?tokens=false")).json()
    whole = (await api.ask(f"/v1/turns/{turn_id}")).json()
    assert found["request"]["prompt_tokens"] == len(whole["request"]["prompt_ids"])
    assert found["turn"]["response_tokens"] == len(whole["turn"]["response_ids"])
    for part in ("request", "turn", "sample"):
        assert not [name for name in found[part] if name.endswith(("_ids", "_log_probs", "_mask"))]
    assert found["sample"]["extra_json"] == whole["sample"]["extra_json"]
    before = (await api.ask(f"/v1/turns/{turn_id}/state")).json()
    await api.ask(f"/v1/turns/{turn_id}", "key-admin", {"verdict": 1})
    after = (await api.ask(f"/v1/turns/{turn_id}/state")).json()
    assert before != after
    assert (before["demonstration_of"], after["feedback"]) == (None, before["feedback"] + 1)


@pytest.mark.parametrize("body", [{}, {"verdict": 1, "train": False}, {"train": True}, {"verdict": 3}, {"state": "x"}])
async def test_a_change_says_one_thing(api, body):
    await api.turn("a")
    assert (await api.ask("/v1/turns/a", "key-admin", body)).status_code in (400, 422)


async def test_outcomes_are_of_ones_own_replies(api):
    await api.turn("a", user="ann")
    await api.turn("b", user="bob")
    found = (await api.ask("/v1/outcomes?turn_id=a&turn_id=b&turn_id=c")).json()["outcomes"]
    assert [row["turn_id"] for row in found] == ["a"]
    assert (await api.ask("/v1/outcomes?turn_id=a", "key-admin")).status_code == 401
    assert (await api.ask("/v1/outcomes")).status_code == 422

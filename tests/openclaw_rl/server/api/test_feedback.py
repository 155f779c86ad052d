"""`POST /v1/feedback` over a real ledger: the owner of a turn, the fields of a body, and repeated feedback, which
counts once.

(`written_reply` of the real front end is tested in `proxy/test_frontend.py`.)
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from turns import make_request, make_turn, serve_turn

from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.messages import Message
from openclaw_rl.server.api.app import http_app
from openclaw_rl.server.api.feedback import FeedbackDeps, build_feedback_router
from openclaw_rl.settings import ApiKey, TrainingSettings
from openclaw_rl.types import DropReason, NextState, WrittenReply
from openclaw_rl.web.auth import Keys


class Words:
    """A tokenizer with one token a word, and an end."""

    context_length = 20

    def written_reply(self, text: str) -> WrittenReply:
        return WrittenReply((*(len(word) for word in text.split()), 99), given=text.split().count("</think>"))


@dataclass
class Api:
    client: httpx.AsyncClient
    ledger: Ledger
    rings: list[str] = field(default_factory=list)

    async def turn(self, name: str, *, user: str = "ann", session: str = "s", drop: DropReason | None = None) -> str:
        request = make_request(name, user=user, session=session, prompt=(1, 2, 3))
        return await serve_turn(self.ledger, request, make_turn(name, drop=drop))

    async def say(self, key: str | None = "key-ann", **body: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.client.post("/v1/feedback", json=body, headers=headers)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    keys = [
        ApiKey(key="key-ann", user="ann"),
        ApiKey(key="key-bob", user="bob"),
        ApiKey(key="key-ann-2", user="ann", train=False),
    ]
    ledger = await Ledger.open(
        tmp_path / "l.sqlite", identity=Identity("base", "tokenizer", "tiny"), training=TrainingSettings()
    )
    app = http_app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        api = Api(client, ledger)
        deps = FeedbackDeps(
            ledger, Keys(keys), Words(), lambda: api.rings.append("judged"), lambda: api.rings.append("sampled")
        )
        app.include_router(build_feedback_router(deps))
        yield api
    assert await ledger.audit(is_deep=True) == []
    await ledger.aclose()


@pytest.mark.parametrize("name", ["turn_id", "id", "session_id"])
@pytest.mark.parametrize(("value", "sign"), [(True, 1), (False, -1), (1, 1), (-0.5, -1), (0, 0)])
async def test_a_word_of_the_user_is_the_verdict(api, name, value, sign):
    turn_id = await api.turn("t", session="s-9")
    reply = await api.say(**{name: "s-9" if name == "session_id" else turn_id}, value=value, feedback_id="f")
    assert reply.status_code == 200
    assert reply.json() == {
        "feedback_id": "f",
        "turn_id": "t",
        "state": "judged",
        "effect": "judged",
        "demonstration_id": None,
    }
    assert (await api.ledger.turn("t")).verdict.value == sign
    assert api.rings == ["judged"]


async def test_sending_it_again_is_harmless_and_other_words_under_the_same_id_are_refused(api):
    turn_id = await api.turn("t")
    said = {"turn_id": turn_id, "value": True, "comment": "nice", "demonstration": "so it is", "feedback_id": "f"}
    once, again = await api.say(**said), await api.say(**said)
    assert once.status_code == 200
    assert once.json() == again.json()
    assert len((await api.ledger.turn(turn_id)).feedback) == 1
    refused = await api.say(**{**said, "value": False})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "feedback_id_reused")


async def test_without_an_id_of_its_own_each_is_new(api):
    turn_id = await api.turn("t")
    ids = {(await api.say(turn_id=turn_id, value=True)).json()["feedback_id"] for _ in range(2)}
    assert len(ids) == len((await api.ledger.turn(turn_id)).feedback) == 2


async def test_a_key_reaches_only_its_own_turns_and_cannot_tell_others_from_none(api):
    await api.turn("t-ann", user="ann", session="s-ann")
    for theirs, nothing in (({"id": "t-ann"}, {"id": "t-none"}), ({"session_id": "s-ann"}, {"session_id": "s-none"})):
        answers = [await api.say("key-bob", **what, value=True) for what in (theirs, nothing)]
        texts = [answer.text.replace("-ann", "-none") for answer in answers]
        assert (answers[0].status_code, texts[0]) == (answers[1].status_code, texts[1])
        assert answers[0].status_code == 404
        assert answers[0].json()["error"]["code"] == "turn_not_found"
    assert (await api.ledger.turn("t-ann")).state == "served"
    assert (await api.say("key-ann-2", id="t-ann", value=True)).status_code == 200  # a key of the same user


@pytest.mark.parametrize("key", [None, "", "wrong", "key-ann2"])
async def test_without_a_key_nothing_is_read(api, key):
    await api.turn("t")
    reply = await api.say(key, turn_id="t", value=True)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (await api.ledger.turn("t")).state == "served"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"turn_id": "t"}, 400, "value"),
        ({"value": True}, 400, "turn_id"),
        ({"turn_id": "t", "id": "t", "value": True}, 400, "turn_id"),
        ({"turn_id": "t", "session_id": "s", "value": True}, 400, "turn_id"),
        ({"turn_id": "t", "value": 1.5}, 400, "value"),
        ({"turn_id": "t", "value": 10**400}, 400, "value"),
        ({"turn_id": "t", "value": float("nan")}, 400, "value"),
        ({"turn_id": "t", "value": "good"}, 422, "value"),
        ({"turn_id": "t", "value": []}, 422, "value"),
        ({"turn_id": "t", "comment": "  "}, 400, "comment"),
        ({"turn_id": "t", "demonstration": ""}, 400, "demonstration"),
        ({"turn_id": "t", "demonstration": "word " * 17}, 400, "demonstration"),
        ({"turn_id": "t", "valeu": 1}, 422, "valeu"),
        ({"turn_id": "", "value": 1}, 422, "turn_id"),
        ({"turn_id": 7, "value": 1}, 422, "turn_id"),
        ([1], 422, None),
        ("", 422, None),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_kept(api, body, status, param):
    await api.turn("t")
    content = json.dumps(body) if body else ""
    reply = await api.client.post("/v1/feedback", content=content, headers={"authorization": "Bearer key-ann"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert (await api.ledger.turn("t")).feedback == ()


async def test_a_body_beyond_all_measure_is_refused(api):
    reply = await api.client.post("/v1/feedback", content=b" " * 2**21, headers={"authorization": "Bearer key-ann"})
    assert reply.status_code == 413


async def test_a_demonstration_waits_for_a_trainer_at_once(api):
    await api.turn("t")
    reply = await api.say(id="t", demonstration="Sleep before midnight")
    assert reply.json()["demonstration_id"] == "t-demo"
    assert api.rings == ["sampled"]
    (sample,) = (await api.ledger.lease(trainer="a", now=True)).samples
    assert (sample.response_ids, sample.prompt_ids, sample.is_demonstration) == ((5, 6, 8, 99), (1, 2, 3), True)


async def test_what_the_template_wrote_of_a_demonstration_is_not_trained(api):
    await api.turn("t")
    await api.say(id="t", demonstration="</think> Sleep early")
    (sample,) = (await api.ledger.lease(trainer="a", now=True)).samples
    assert (sample.response_ids, sample.loss_mask) == ((8, 5, 5, 99), (False, True, True, True))


async def test_a_key_that_is_not_to_be_learned_from_demonstrates_nothing(api):
    await api.turn("t")
    reply = await api.say("key-ann-2", id="t", demonstration="Sleep before midnight")
    assert (reply.json()["demonstration_id"], api.rings) == (None, [])


async def test_late_feedback_is_taken_and_said_to_be_late(api):
    await api.turn("t")
    await api.say(id="t", value=True)
    (judged,) = await api.ledger.to_score(1)
    from openclaw_rl.methods.base import ScoringTools
    from openclaw_rl.methods.binary_rl import METHOD

    await api.ledger.record_sample(await METHOD.score(judged, ScoringTools()))
    assert await api.ledger.lease(trainer="a", now=True) is not None
    api.rings.clear()
    reply = await api.say(id="t", value=False)
    assert (reply.json()["effect"], reply.json()["state"], api.rings) == ("late", "leased", [])


async def test_the_rules_of_a_dropped_turn(api):
    await api.turn("silent")
    await api.ledger.drop("silent", DropReason.NO_NEXT_STATE)
    await api.turn("greedy", drop=DropReason.NOT_TRAINABLE_SAMPLING)
    answers = [(await api.say(id=name, value=True)).json() for name in ("silent", "greedy")]
    assert [(answer["effect"], answer["state"]) for answer in answers] == [
        ("judged", "judged"),
        ("recorded", "dropped"),
    ]
    state = NextState((Message(role="user", content="x"),))
    await api.ledger.pair("silent", state, by_request_id="later")

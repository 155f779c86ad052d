"""`/v1/episodes*` over a real ledger: the contract with a runner, and one clear error for each wrong call."""

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from turns import KEY, make_request, make_turn, serve_turn

from openclaw_rl.ledger import Identity, Ledger, LedgerLimits
from openclaw_rl.methods.agent import AgentSettings
from openclaw_rl.server.api.app import http_app
from openclaw_rl.server.api.episodes import EpisodesDeps, build_episodes_router
from openclaw_rl.settings import ApiKey, EpisodeSettings, MethodSettings, TrainingSettings
from openclaw_rl.web.auth import Keys, Secret

LONG = "x" * 10_000


@dataclass
class Api:
    client: httpx.AsyncClient
    ledger: Ledger
    rings: list[str] = field(default_factory=list)

    async def post(self, path: str, body: Any = None, *, key: str | None = "key-ann", **more: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        if isinstance(body, str):
            json = {"content-type": "application/json"}
            return await self.client.post(path, content=body, headers=headers | json)
        return await self.client.post(path, json=more if body is None else body, headers=headers)

    async def get(self, path: str, *, key: str = "key-ann") -> httpx.Response:
        return await self.client.get(path, headers={"authorization": f"Bearer {key}"})

    async def open(self, name: str = "e", *, key: str = "key-ann", **more: Any) -> httpx.Response:
        return await self.post("/v1/episodes", key=key, **{"task": "t", "episode_id": name, **more})

    async def turn(self, turn_id: str, name: str = "e", *, user: str = "ann") -> None:
        episode = await self.ledger.find_episode(user, name)
        assert episode is not None
        request = make_request(turn_id, user=user, in_episode=episode.number, episode=name)
        await serve_turn(self.ledger, request, make_turn(turn_id), KEY)


@pytest.fixture
def method() -> MethodSettings:
    return AgentSettings(name="agent")


@pytest.fixture
async def api(tmp_path: Path, method: MethodSettings) -> AsyncIterator[Api]:
    keys = [
        ApiKey(key="key-ann", user="ann"),
        ApiKey(key="key-bob", user="bob"),
        ApiKey(key="key-eve", user="eve", train=False),
    ]
    ledger = await Ledger.open(
        tmp_path / "l.sqlite",
        identity=Identity("base", "tokenizer", "tiny"),
        training=TrainingSettings(),
        limits=LedgerLimits(episodes=EpisodeSettings(max_groups_ahead=3, groups_per_step=1)),
    )
    app = http_app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server:30000") as client:
        api, numbers = Api(client, ledger), itertools.count(1)
        deps = EpisodesDeps(
            ledger,
            Keys(keys),
            Secret("admin"),
            method,
            make_id=lambda: f"made-{next(numbers)}",
            on_change=lambda: api.rings.append("changed"),
        )
        app.include_router(build_episodes_router(deps))
        yield api
    assert await ledger.audit(is_deep=True) == []
    await ledger.aclose()


def refused(reply: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code), error
    assert param is None or error["param"] == param
    assert len(error["message"]) < 300
    return str(error["message"])


async def test_an_episode_from_its_opening_to_its_outcome(api):
    opened = await api.open(group="g", group_size=2)
    assert opened.status_code == 201
    assert opened.json() == {
        "episode_id": "e",
        "base_url": "http://server:30000/v1/episodes/e/v1",
        "task": "t",
        "group": "g",
        "group_size": 2,
        "split": "train",
        "state": "running",
        "user": "ann",
        "opened_at": opened.json()["opened_at"],
        "ended_at": None,
        "outcome": None,
        "reason": None,
    }
    await api.turn("turn-1")
    body = {"reward": 0.5, "truncated": True, "metrics": {"passed": 3, "share": 0.75}}
    ended = await api.post("/v1/episodes/e/outcome", body)
    assert ended.status_code == 200
    found = (await api.get("/v1/episodes/e")).json()
    assert ended.json() == found
    assert (found["state"], found["outcome"]) == ("ended", body)
    assert found["turns"] == [
        {"id": "turn-1", "step": 1, "state": "judged", "reason": None, "reward": None, "advantage": None}
    ]
    assert (await api.post("/v1/episodes/e/outcome", body)).json() == found
    refused(await api.post("/v1/episodes/e/outcome", reward=0.25), 409, "outcome_conflict")
    assert api.rings == ["changed", "changed"]


async def test_the_server_makes_an_id_and_a_group_of_one(api):
    opened = (await api.post("/v1/episodes", task="t")).json()
    assert (opened["episode_id"], opened["group"], opened["group_size"]) == ("made-1", None, 1)


async def test_an_abort_and_its_repetition(api):
    await api.open()
    await api.turn("turn-1")
    aborted = await api.post("/v1/episodes/e/abort", reason="no disk")
    assert (aborted.status_code, aborted.json()["state"], aborted.json()["reason"]) == (200, "aborted", "no disk")
    assert aborted.json()["turns"][0]["reason"] == "episode_aborted"
    assert (await api.post("/v1/episodes/e/abort", {})).json() == aborted.json()
    refused(await api.post("/v1/episodes/e/outcome", reward=1), 409, "episode_over")


async def test_a_retry_leaves_its_place_in_the_group(api):
    await api.open("a", group="g", group_size=1)
    refused(await api.open("b", group="g", group_size=1), 409, "group_full")
    await api.post("/v1/episodes/a/abort", reason="x", retry=True)
    assert (await api.open("b", group="g", group_size=1)).status_code == 201


async def test_lists_and_episodes_are_ones_own_and_the_operator_sees_all(api):
    await api.open("a", group="g", group_size=2)
    await api.open("b", task="u", key="key-bob")

    async def listed(query: str = "", key: str = "key-ann") -> list[str]:
        return [found["episode_id"] for found in (await api.get(f"/v1/episodes{query}", key=key)).json()["episodes"]]

    assert await listed() == ["a"]
    assert await listed(key="key-bob") == ["b"]
    assert await listed(key="admin") == ["b", "a"]
    assert await listed("?state=running&group=g&task=t&limit=5") == ["a"]
    assert await listed("?task=u") == []
    theirs, none = [refused(await api.get(f"/v1/episodes/{name}"), 404, "episode_not_found") for name in ("b", "c")]
    assert theirs.replace("'b'", "'c'") == none
    for verb, body in (("outcome", {"reward": 1}), ("abort", {})):
        refused(await api.post(f"/v1/episodes/b/{verb}", body), 404, "episode_not_found")
    assert (await api.get("/v1/episodes/b", key="admin")).json()["user"] == "bob"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"reward": NaN}', "reward"),
        ('{"reward": Infinity}', "reward"),
        ({"reward": 2}, "reward"),
        ({"reward": -1.0001}, "reward"),
        ({"reward": True}, "reward"),
        ({"reward": "1"}, "reward"),
        ({}, "reward"),
        ({"reward": None}, "reward"),
        ({"reward": 1, "truncated": "yes"}, "truncated"),
        ('{"reward": 1, "metrics": {"x": NaN}}', "metrics.x"),
        ({"reward": 1, "metrics": {"x": "1"}}, "metrics.x"),
        ({"reward": 1, "metrics": {str(n): n for n in range(65)}}, "metrics"),
        ({"reward": 1, "score": 1}, "score"),
    ],
)
async def test_an_outcome_that_is_none_is_refused_and_the_episode_runs_on(api, body, param):
    await api.open()
    await api.turn("turn-1")
    reply = await api.post("/v1/episodes/e/outcome", body)
    assert reply.status_code == 422
    assert reply.json()["error"]["param"] == param
    assert (await api.get("/v1/episodes/e")).json()["state"] == "running"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "task"),
        ({"task": ""}, "task"),
        ({"task": LONG}, "task"),
        ({"task": "t", "episode_id": LONG}, "episode_id"),
        ({"task": "t", "episode_id": "a/b"}, "episode_id"),
        ({"task": "t", "episode_id": ".."}, "episode_id"),
        ({"task": "t", "group": LONG}, "group"),
        ({"task": "t", "group": ""}, "group"),
        ({"task": "t", "group_size": 2}, "group"),
        ({"task": "t", "group": "g", "group_size": 0}, "group_size"),
        ({"task": "t", "group": "g", "group_size": 2.5}, "group_size"),
        ({"task": "t", "split": "test"}, "split"),
        ({"task": "t", "steps": 3}, "steps"),
        ([], None),
        ("{", None),
    ],
)
async def test_an_opening_that_is_none_is_refused(api, body, param):
    reply = await api.post("/v1/episodes", body)
    assert reply.status_code == 422
    assert reply.json()["error"]["param"] == param
    assert (await api.get("/v1/episodes")).json() == {"episodes": []}


async def test_unknown_and_endless_ids_are_not_found(api):
    for name in ("none", LONG):
        refused(await api.get(f"/v1/episodes/{name}"), 404, "episode_not_found")
        refused(await api.post(f"/v1/episodes/{name}/outcome", reward=1), 404, "episode_not_found")
        refused(await api.post(f"/v1/episodes/{name}/abort", {}), 404, "episode_not_found")


async def test_an_outcome_without_turns_or_while_a_reply_streams_is_refused(api):
    await api.open()
    refused(await api.post("/v1/episodes/e/outcome", reward=1), 409, "episode_without_turns")
    number = (await api.ledger.find_episode("ann", "e")).number
    await api.ledger.begin(make_request("r", in_episode=number, episode="e"))
    busy = await api.post("/v1/episodes/e/outcome", reward=1)
    refused(busy, 409, "episode_busy")
    assert busy.headers["retry-after"] == "1"
    await api.ledger.finish(make_turn("turn-1", request="r"), KEY)
    assert (await api.post("/v1/episodes/e/outcome", reward=1)).status_code == 200


async def test_groups_that_do_not_fit_and_too_many_of_them(api):
    await api.open("a", group="g", group_size=2)
    refused(await api.open("b", group="g", group_size=3), 409, "group_conflict", "group_size")
    refused(await api.open("a", group="h", group_size=2), 409, "episode_id_reused", "episode_id")
    await api.open("b")
    await api.open("c")
    late = await api.open("d")
    refused(late, 429, "too_many_groups", "group")
    assert late.headers["retry-after"] == "5"
    assert (await api.open("e", group="g", group_size=2)).status_code == 201
    assert (await api.open("f", task="held out", split="eval")).status_code == 201
    refused(await api.open("h", task="held out"), 409, "task_is_eval", "task")


async def test_a_key_that_does_not_train_may_only_evaluate(api):
    refused(await api.open(key="key-eve"), 403, "key_not_trained", "split")
    assert (await api.open(key="key-eve", split="eval")).status_code == 201
    refused(await api.open(key="wrong"), 401, "invalid_api_key")


@pytest.mark.parametrize("method", [MethodSettings()])
async def test_under_another_method_one_may_only_evaluate(api, method):
    assert "method.name = agent" in refused(await api.open(), 409, "method_gives_no_credit", "split")
    assert (await api.open(split="eval")).status_code == 201

"""The episode of a chat: its base URL, its header, its body; labels; and what an environment's words cannot do."""

from dataclasses import replace

import pytest
from chats import HI

from openclaw_rl.engines.base import PRIORITY_BACKGROUND, PRIORITY_CHAT, PRIORITY_EPISODE
from openclaw_rl.errors import EpisodeRefused
from openclaw_rl.types import Episode, EpisodeState, Split

RUNNING = Episode(7, "user", "e-1", "fix the bug", None, 1, Split.TRAIN, EpisodeState.RUNNING, 1.0)


@pytest.fixture
async def proxy(proxy_over, qwen):
    async with proxy_over(qwen) as proxy:
        proxy.book.episodes[("user", "e-1")] = RUNNING
        yield proxy


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        ("/v1/episodes/e-1/v1/chat/completions", {}, {}),
        ("/v1/episodes/e-1/v1/chat/completions", {"x-episode-id": "e-1"}, {"episode": "e-1"}),
        ("/v1/chat/completions", {"x-episode-id": "e-1"}, {}),
        ("/v1/chat/completions", {}, {"episode": "e-1"}),
    ],
)
async def test_path_header_and_body_mean_the_same(proxy, path, headers, body):
    reply = await proxy.client.post(path, json={**HI, **body, "task": "mine"}, headers=headers)
    assert reply.status_code == 200
    (request,) = proxy.book.requests
    assert (request.in_episode, request.episode, request.task) == (7, "e-1", "fix the bug")
    assert request.scope.session_id == "episode:e-1"


async def test_peoples_chats_go_before_an_episodes_in_the_engine(proxy):
    await proxy.client.post("/v1/episodes/e-1/v1/chat/completions", json=HI)
    await proxy.client.post("/v1/chat/completions", json=HI)
    assert [call.priority for call in proxy.fake.calls] == [PRIORITY_EPISODE, PRIORITY_CHAT]
    assert PRIORITY_CHAT > PRIORITY_EPISODE > PRIORITY_BACKGROUND


async def test_every_chat_api_and_the_models_are_served_in_an_episode(proxy):
    base = "/v1/episodes/e-1/v1"
    messages = {"model": "the-policy", "max_tokens": 8, "messages": HI["messages"]}
    assert (await proxy.client.post(f"{base}/responses", json={"input": "hello"})).status_code == 200
    assert (await proxy.client.post(f"{base}/messages", json=messages)).status_code == 200
    assert (await proxy.client.post(f"{base}/messages/count_tokens", json=messages)).status_code == 200
    assert [request.in_episode for request in proxy.book.requests] == [7, 7]
    assert (await proxy.client.get(f"{base}/models")).json()["data"][0]["id"] == "the-policy"
    assert (await proxy.client.get(f"{base}/models/the-policy")).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["feedback", "turns", "episodes", "episodes/e-1/outcome", "episodes/e-1/v1/chat/completions", "admin/status"],
)
async def test_no_other_route_is_inside_an_episode(proxy, path):
    reply = await proxy.client.post(f"/v1/episodes/e-1/v1/{path}", json={})
    assert reply.status_code == 404


async def test_an_id_that_is_not_registered_is_a_label_but_in_a_path(proxy):
    await proxy.post({**HI, "episode": "mine", "step": 4, "task": "t"})
    (request,) = proxy.book.requests
    assert (request.in_episode, request.episode, request.step, request.task) == (None, "mine", 4, "t")
    assert request.scope.session_id is None
    for name in ("mine", "x" * 10_000):
        reply = await proxy.client.post(f"/v1/episodes/{name}/v1/chat/completions", json=HI)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (404, "episode_not_found")
        assert len(error["message"]) < 200


async def test_two_names_are_refused(proxy):
    reply = await proxy.post({**HI, "episode": "e-2"}, **{"x-episode-id": "e-1"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "episode")
    assert proxy.book.requests == []


@pytest.mark.parametrize("state", [EpisodeState.ENDED, EpisodeState.ABORTED, EpisodeState.EXPIRED])
async def test_an_episode_that_is_over_takes_no_request(proxy, state):
    proxy.book.episodes[("user", "e-1")] = replace(RUNNING, state=state)
    for body, headers in ((HI, {"x-episode-id": "e-1"}), ({**HI, "episode": "e-1"}, {})):
        reply = await proxy.post(body, **headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "episode_over")
    assert proxy.fake.calls == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_episode_that_ends_while_a_request_arrives_refuses_it(proxy, stream, monkeypatch):
    async def begin(request):
        raise EpisodeRefused("episode 'e-1' is ended", code="episode_over")

    monkeypatch.setattr(proxy.book, "begin", begin)
    reply = await proxy.post({**HI, "stream": stream}, **{"x-episode-id": "e-1"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "episode_over")
    assert proxy.book.turns == []


async def test_a_sub_agent_of_an_episode_acts_in_it(proxy):
    for headers in ({"x-episode-id": "e-1"}, {}):
        await proxy.post(HI, **{"x-turn-type": "subagent"}, **headers)
    assert [request.in_episode for request in proxy.book.requests] == [7]
    assert [side.kind for side in proxy.book.sides] == ["subagent"]


async def test_an_environments_words_are_no_commands(proxy_over, qwen):
    class Commands:
        async def answer(self, command, caller, chat):
            return "done"

    async with proxy_over(qwen, commands=Commands()) as proxy:
        proxy.book.episodes[("user", "e-1")] = RUNNING
        said = {**HI, "messages": [{"role": "user", "content": "/rl bad"}]}
        assert (await proxy.post(said)).json()["choices"][0]["message"]["content"] == "done"
        await proxy.post(said, **{"x-episode-id": "e-1"})
        (request,) = proxy.book.requests
        assert [message.text() for message in request.messages] == ["/rl bad"]

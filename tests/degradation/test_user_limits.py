"""Limits of each user, on a real server: 429 for a chat over its own limit, and for no other one."""

import asyncio
from typing import Any

import httpx

from openclaw_rl.data_dir import DataDir
from openclaw_rl.settings import UserLimits
from openclaw_rl.web.user_keys import UserKeys

KEYS = {"server__api_keys": [{"key": "sk-ann", "user": "ann"}, {"key": "sk-bob", "user": "bob"}]}


async def chat(here: Any, key: str, path: str = "/v1/chat/completions", text: str = "hello", **body: Any) -> Any:
    sent = {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 12, **body}
    return await here.http.post(path, json=sent, headers={"Authorization": f"Bearer {key}"})


def told(reply: httpx.Response) -> tuple[int, str, str]:
    fault = reply.json()["error"]
    return reply.status_code, fault.get("code") or "", fault["type"]


async def test_one_chat_too_many_of_a_user_is_refused_and_no_others(place: Any) -> None:
    async with place(limits__requests_at_once=2, **KEYS) as here:
        here.engine.breaks("silent", times=2)
        held = [asyncio.create_task(chat(here, "sk-ann", stream=n > 0)) for n in range(2)]

        async def are_held() -> bool:
            return bool(here.engine.asked == 2)

        await here.until(are_held)
        refused = await chat(here, "sk-ann")
        assert told(refused) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert "ann has 2 requests running; the limit is 2 at once" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert told(await chat(here, "sk-ann", "/v1/messages")) == (429, "", "rate_limit_error")
        assert told(await chat(here, "sk-ann", "/v1/responses", input="hi"))[0] == 429
        assert [(await chat(here, "sk-bob")).status_code for _ in range(4)] == [200] * 4
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

        async def has_room() -> bool:
            return bool((await chat(here, "sk-ann")).status_code == 200)

        await here.until(has_room)


async def test_a_user_that_used_the_days_tokens_up_waits_for_the_next_day(place: Any, tmp_path: Any) -> None:
    limit = {"limits__tokens_a_day": 60}
    async with place(tmp_path, **limit, **KEYS) as here:
        used = 0
        while (reply := await chat(here, "sk-ann")).status_code == 200:
            used += reply.json()["usage"]["total_tokens"]
        assert used >= 60, "a chat that began below the limit was finished"
        assert told(reply) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert f"ann has used {used} tokens today; the limit is 60 a day" in reply.json()["error"]["message"]
        assert 0 < int(reply.headers["retry-after"]) <= 86_400
        assert (await chat(here, "sk-bob")).status_code == 200
        command = await chat(here, "sk-ann", text="/rl status")
        assert command.status_code == 200, "a command costs no token"
    async with place(tmp_path, **limit, **KEYS) as here:
        again = await chat(here, "sk-ann")
        assert (again.status_code, str(used) in again.json()["error"]["message"]) == (429, True), "after a restart too"
        assert (await chat(here, "sk-bob")).status_code == 200


async def test_a_users_own_limit_holds_from_the_next_request_on(place: Any, tmp_path: Any) -> None:
    users = UserKeys(DataDir.prepare(tmp_path / "data").users)
    key = users.add("ann", train=True, now=1.0)
    async with place(tmp_path) as here:
        assert (await chat(here, key)).status_code == 200
        users.change("ann", limits=UserLimits(tokens_a_day=1))
        assert told(await chat(here, key))[0] == 429
        users.change("ann", limits=UserLimits(tokens_a_day=10_000))
        assert (await chat(here, key)).status_code == 200

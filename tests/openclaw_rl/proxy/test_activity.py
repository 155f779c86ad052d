"""Chats under way are counted, and what waits for one hears of it at once."""

import asyncio

import pytest
from chats import HI, ids_of
from waiting import until

from openclaw_rl.proxy.activity import ChatActivity
from openclaw_rl.testing import Scripted


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


async def test_it_is_idle_since_the_last_chat_ended():
    clock = Clock()
    activity = ChatActivity(clock)
    clock.now += 5
    assert (activity.is_idle, activity.idle_s) == (True, 5.0)
    activity.begin()
    activity.begin()
    activity.end()
    clock.now += 7
    assert (activity.is_idle, activity.idle_s) == (False, 0.0)
    activity.end()
    clock.now += 2
    assert (activity.is_idle, activity.idle_s) == (True, 2.0)


async def test_whoever_waits_for_a_chat_hears_of_it():
    activity = ChatActivity()
    waiting = asyncio.create_task(activity.begins())
    await asyncio.sleep(0)
    assert not waiting.done()
    activity.begin()
    await asyncio.wait_for(waiting, 120)
    await activity.begins()  # at once while one runs
    activity.end()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_counts_from_its_first_call_of_the_engine_to_its_record(qwen, proxy_over, stream: bool) -> None:
    async with proxy_over(qwen) as proxy:
        activity = proxy.deps.activity
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hello"), hold_after=1))
        asking = asyncio.create_task(proxy.client.post("/v1/chat/completions", json={**HI, "stream": stream}))
        await until(lambda: proxy.fake.holding)
        assert not activity.is_idle
        proxy.fake.release()
        assert (await asking).status_code == 200
        await until(lambda: activity.is_idle)


async def test_a_client_that_leaves_ends_its_chat(qwen, proxy_over) -> None:
    async with proxy_over(qwen) as proxy:
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hello"), hold_after=1))
        asking = asyncio.create_task(proxy.client.post("/v1/chat/completions", json=HI))
        await until(lambda: proxy.fake.holding)
        asking.cancel()
        await until(lambda: proxy.deps.activity.is_idle)

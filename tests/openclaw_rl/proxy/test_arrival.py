"""The engine is asked beside the ledger, not after it: the parts of a reply that a slow ledger delays."""

import asyncio
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from chats import HI, ids_of
from waiting import until

from openclaw_rl.settings import ServerSettings
from openclaw_rl.testing import Scripted
from openclaw_rl.types import DropReason


@pytest.fixture
def slow_ledger(proxy_over):
    """`async with slow_ledger(frontend) as (proxy, go)`: no request is in the ledger before `go` is set."""

    @asynccontextmanager
    async def start(frontend, **settings):
        async with proxy_over(frontend, **settings) as proxy:
            go, begin = asyncio.Event(), proxy.book.begin

            async def slow(request) -> None:
                await go.wait()
                await begin(request)

            proxy.book.begin = slow
            yield proxy, go

    return start


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_a_reply_goes_out_before_its_request_is_recorded(qwen, slow_ledger, stream: bool) -> None:
    async with slow_ledger(qwen) as (proxy, go):
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hello")))
        request = proxy.client.build_request("POST", "/v1/chat/completions", json={**HI, "stream": stream})
        head = asyncio.create_task(proxy.client.send(request, stream=True))
        await until(lambda: proxy.fake.calls)
        await asyncio.wait((head,), timeout=0.3)  # longer than a stream's head waits for an engine
        assert not head.done()
        assert proxy.book.requests == []
        go.set()
        reply = await head
        assert "x-openclaw-recorded" not in reply.headers
        assert "H" in (await reply.aread()).decode()
        assert proxy.book.log[-1] == "served"


async def test_a_first_token_that_waited_for_its_request_goes_before_the_pairing(qwen, slow_ledger) -> None:
    async with slow_ledger(qwen) as (proxy, go):
        counted, observe, feeds = [], proxy.book.observe, proxy.deps.health.first_token

        async def noted(request):
            counted.append(feeds.cumulative()[-1][1])
            return await observe(request)

        proxy.book.observe = noted
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hello")))
        reply = asyncio.create_task(proxy.post({**HI, "stream": True}))
        await until(lambda: proxy.fake.calls)
        await asyncio.wait((reply,), timeout=0.2)  # the token is here before the commit
        assert counted == []
        go.set()
        assert (await reply).status_code == 200
        assert counted == [1.0]


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_a_reply_goes_out_when_its_recording_is_broken(qwen, proxy_over, stream: bool) -> None:
    """A fault of our own code, not an error of the ledger, which would leave the turn unrecorded."""

    async def broken(request) -> None:
        raise OverflowError("a fault of ours")

    async with proxy_over(qwen) as proxy:
        proxy.book.begin = broken
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hello"), hold_after=0))  # the engine is the later of the two
        request = proxy.client.build_request("POST", "/v1/chat/completions", json={**HI, "stream": stream})
        head = asyncio.create_task(proxy.client.send(request, stream=True))
        await until(lambda: proxy.fake.holding)
        await asyncio.wait((head,), timeout=0.3)
        proxy.fake.release()
        said = b""
        with suppress(httpx.HTTPError):
            async for piece in (await head).aiter_raw():
                said += piece
        assert b"H" not in said


async def test_a_request_that_ends_before_it_is_recorded_is_recorded_first(qwen, slow_ledger) -> None:
    """The engine refuses the first request at once; the client of the second one leaves."""
    async with slow_ledger(qwen) as (proxy, go):
        proxy.fake.script(Scripted(ids=(), refuse=(422, "no")), Scripted(ids=ids_of(qwen, "Hello"), hold_after=0))
        refused = asyncio.create_task(proxy.post(HI))
        await until(lambda: len(proxy.fake.calls) == 1)
        leaving = asyncio.create_task(proxy.post(HI))
        await until(lambda: proxy.fake.holding)
        leaving.cancel()
        await until(lambda: proxy.fake.aborted)
        assert proxy.book.log.count("abandon") == 0
        go.set()
        assert (await refused).status_code == 422
        await until(lambda: len(proxy.book.abandoned) == 2)
        begun = [request.request_id for request in proxy.book.requests]
        assert {reason: begun.index(request_id) for request_id, reason, _ in proxy.book.abandoned} == {
            DropReason.REFUSED: 0,
            DropReason.CANCELLED: 1,
        }


async def test_a_client_of_a_slow_ledger_hears_that_we_are_there(qwen, slow_ledger) -> None:
    async with slow_ledger(qwen, server=ServerSettings(keepalive_s=0.05)) as (proxy, go):
        proxy.fake.script(Scripted(ids=ids_of(qwen, "Hello")))
        async with proxy.client.stream("POST", "/v1/chat/completions", json={**HI, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                assert "H" not in line
                if line.startswith(":"):
                    break
            go.set()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_to_the_first_token_is_counted_once_a_reply(qwen, proxy_over, stream: bool) -> None:
    async with proxy_over(qwen) as proxy:
        for n in range(1, 3):
            reply = await proxy.post({**HI, "stream": stream, "max_tokens": 5})
            assert reply.status_code == 200
            durations = proxy.deps.health.first_token
            assert durations.cumulative()[-1] == ("+Inf", float(n))
            assert 0 < durations.total_s < 60

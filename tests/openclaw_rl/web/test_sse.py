"""One stream's sender: its head, keep-alives, and a client that takes nothing."""

import asyncio
from typing import Any

import pytest

from openclaw_rl.web.client_gone import until_gone
from openclaw_rl.web.sse import EventSender


def sender(send: Any, *, stall_s: float, keepalive_s: float = 60.0) -> EventSender:
    return EventSender(
        send,
        headers=dict,
        opening=b"",
        is_held=lambda: False,
        open_after_s=0.0,
        keepalive_s=keepalive_s,
        stall_s=stall_s,
    )


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def test_a_client_that_takes_nothing_counts_as_one_that_left() -> None:
    sent: list[bytes] = []

    async def takes_one(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            if len(sent) > 1:
                await asyncio.Event().wait()

    stream, ended = sender(takes_one, stall_s=0.01), []

    async def work() -> None:
        try:
            for event in (b"1", b"2", b"3"):
                await stream.event(event)
        finally:
            ended.append(True)

    async with asyncio.timeout(60):
        assert not await until_gone(stays, work())
    assert (sent, ended) == ([b"1", b"2"], [True])


async def test_a_client_that_takes_some_time_gets_every_event_once() -> None:
    """A send may wait more than once, for the client and for other tasks."""
    sent: list[bytes] = []

    async def takes_time(message: Any) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        if body := message.get("body"):
            sent.append(body)
        await asyncio.sleep(0)

    stream = sender(takes_time, stall_s=60)
    for event in (b"1", b"2"):
        await stream.event(event)
    await stream.end(b"3")
    assert sent == [b"1", b"2", b"3"]


@pytest.mark.parametrize("waits", [0, 1, 2])
async def test_a_fault_of_the_connection_reaches_the_reply(waits: int) -> None:
    async def breaks(message: Any) -> None:
        for _ in range(waits):
            await asyncio.sleep(0)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await sender(breaks, stall_s=60).event(b"1")


async def test_a_send_that_waits_ends_when_its_caller_is_cancelled() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def waits(message: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(sender(waits, stall_s=60).event(b"1"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_keep_alive_that_nobody_takes_ends_no_reply() -> None:
    async def takes_events_alone(message: Any) -> None:
        if message.get("body", b"").startswith(b":"):
            await asyncio.Event().wait()

    stream, stalled = sender(takes_events_alone, stall_s=0.01, keepalive_s=0.01), asyncio.Event()

    async def keep_alive() -> None:
        try:
            await stream.keep_alive()
        finally:
            stalled.set()

    async def work() -> None:
        await stream.event(b"1")
        await stalled.wait()
        await stream.end(b"2")

    async with asyncio.timeout(60):
        assert await until_gone(stays, work(), keep_alive())


async def test_a_part_that_the_client_takes_later_comes_before_the_next() -> None:
    sent: list[bytes] = []
    go = asyncio.Event()

    async def send(message: Any) -> None:
        if message.get("body") == b"2":
            await go.wait()
        if body := message.get("body"):
            sent.append(body)

    stream = sender(send, stall_s=60)
    await stream.event(b"0")
    assert stream.event_at_once(b"1")
    assert not stream.event_at_once(b"2")
    assert sent == [b"0", b"1"]
    end = asyncio.create_task(stream.end(b"3"))
    await asyncio.sleep(0.01)
    assert sent == [b"0", b"1"]
    go.set()
    await end
    assert sent == [b"0", b"1", b"2", b"3"]


async def test_a_client_that_never_takes_the_part_counts_as_one_that_left() -> None:
    async def takes_no_body(message: Any) -> None:
        if message.get("body") == b"1":
            await asyncio.Event().wait()

    stream = sender(takes_no_body, stall_s=0.01)

    async def work() -> None:
        await stream.event(b"0")
        assert not stream.event_at_once(b"1")
        await stream.event(b"2")

    async with asyncio.timeout(60):
        assert not await until_gone(stays, work())


async def test_a_full_client_in_a_silence_costs_one_look_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep of a time that is over would keep the event loop busy for as long as the reply is silent."""

    async def takes_no_body(message: Any) -> None:
        if message.get("body") == b"1":
            await asyncio.Event().wait()

    stream = sender(takes_no_body, stall_s=60, keepalive_s=30.0)
    await stream.event(b"0")
    assert not stream.event_at_once(b"1")
    stream._sent_at -= 31.0
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await stream.keep_alive()
    assert slept[1:] == [30.0, 30.0]

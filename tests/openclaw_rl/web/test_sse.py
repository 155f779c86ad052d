"""One stream's sender: its head, keep-alives, and a client that takes nothing."""

import asyncio
from typing import Any

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

"""Limits of the server once they are reached: large bodies, slow bodies, many streams."""

import asyncio
from typing import Any


async def test_a_body_that_is_too_large_is_413_on_every_route_before_it_is_read(place: Any) -> None:
    async with place(server__max_body_mb=0.5) as here:

        async def endless() -> Any:
            for _ in range(200):
                yield b" " * 65536

        for path in ("/v1/chat/completions", "/v1/feedback", "/v1/admin/rollback"):
            for content in (b" " * 2**20, endless()):
                reply = await here.http.post(path, content=content, headers={"content-type": "application/json"})
                assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large"), path
        assert (await here.chat()).status_code == 200


async def test_a_body_that_never_comes_gives_its_place_back(place: Any) -> None:
    async with place(server__body_timeout_s=4.0, server__max_streams=1) as here:
        port = int(here.server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 500\r\n"
        writer.write(head.encode() + b"expect: 100-continue\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100"), "it has its place, and is read"
        writer.write(b'{"messages"')
        full = await here.chat()
        assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
        assert full.headers["retry-after"]
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408")
        writer.close()

        async def has_room() -> bool:
            return bool((await here.chat()).status_code == 200)

        await here.until(has_room)


async def test_one_stream_too_many_is_told_to_come_again(place: Any) -> None:
    async with place(server__max_streams=2) as here:
        here.engine.breaks("silent", times=2)
        held = [asyncio.create_task(here.chat(session=f"h{n}")) for n in range(2)]

        async def are_held() -> bool:
            return here.engine.asked == 2

        await here.until(are_held)
        reply = await here.chat(session="third")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
        assert int(reply.headers["retry-after"]) > 0
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)

        async def has_room() -> bool:
            return bool((await here.chat()).status_code == 200)

        await here.until(has_room)

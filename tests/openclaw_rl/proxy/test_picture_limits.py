"""Limits of pictures: pixels, threads, memory and time of all requests together."""

import asyncio
import base64
import gc
import hashlib
import io
import json
import random
import threading
import tracemalloc

import pytest
from pictures import ONE, TWO, asked, chunk, picture_file, picture_part, text
from PIL import Image

from openclaw_rl.models.picture_memory import AT_ONCE
from openclaw_rl.proxy import pictures as pictures_module
from openclaw_rl.proxy.body import ParsedBody, parse_body
from openclaw_rl.proxy.pictures import PictureReader
from openclaw_rl.settings import PictureSettings
from openclaw_rl.types.pictures import pictures_in


def noise(seed: int, form: str = "PNG", side: int = 40, **options) -> bytes:
    """Return a picture that no packing makes smaller."""
    out = io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side)).save(out, form, **options)
    return out.getvalue()


FULL = {"max_pixels": 1600, "memory_mb": 1.05}
"""Room for some 13 KB of files, beside the work on one picture."""


def parsed(*parts) -> ParsedBody:
    return parse_body(json.dumps(asked(*parts)).encode())


async def read(reader: PictureReader, body: ParsedBody):
    """Read a request's pictures as a chat does; return messages and pictures."""
    async with reader.seat() as seat:
        body = await seat.take(body)
        await seat.check()
        return body.chat.messages, seat.pictures


async def test_a_picture_that_comes_again_is_not_decoded_again(monkeypatch) -> None:
    reader = PictureReader(PictureSettings(), None)
    body = parsed(picture_part(ONE), picture_part(ONE), picture_part(TWO, "image/jpeg"))
    _, first = await read(reader, body)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("decoded again"))
    _, again = await read(reader, body)
    assert first == again
    assert hashlib.sha256(ONE).hexdigest() not in str(reader._known)


async def test_no_pixel_is_decoded_before_all_headers_are_checked(seeing_proxy, monkeypatch) -> None:
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("decoded"))
    start, engine = seeing_proxy(max_pixels=10_000)
    huge = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", b"\0\1\0\0\0\1\0\0\x08\x02\0\0\0") + chunk(b"IEND")
    async with start as proxy:
        error = (await proxy.post(asked(picture_part(ONE), picture_part(huge)))).json()["error"]
        assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[1]")
        assert "65536 x 65536 pixels are more than pictures.max_pixels" in error["message"]
        assert engine.sent == []


async def test_the_pixels_of_a_request_have_a_limit(seeing_proxy) -> None:
    start, engine = seeing_proxy(max_pixels_per_request=2 * 32 * 24)
    async with start as proxy:
        assert (await proxy.post(asked(picture_part(ONE), picture_part(ONE)))).status_code == 200
        error = (await proxy.post(asked(picture_part(ONE), picture_part(ONE), picture_part(ONE)))).json()["error"]
        assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[2]")
        assert "pictures.max_pixels_per_request (1536)" in error["message"]
        assert len(engine.sent) == 1


async def test_few_pictures_are_decoded_at_once_and_requests_take_turns(monkeypatch) -> None:
    reader = PictureReader(PictureSettings(), None)
    lock, running, most = threading.Lock(), 0, 0
    line: list[int] = []
    """The request of each picture, in the order in which they were handed to the threads."""
    own, hand_over = pictures_module.check, reader.memory.submit

    def in_line(work):
        if work.func == reader.check:
            line.append(work.args[0].height)
        return hand_over(work)

    monkeypatch.setattr(reader.memory, "submit", in_line)

    def counted(data, size):
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        both.wait(30)
        try:
            return own(data, size)
        finally:
            with lock:
                running -= 1

    both = threading.Event()
    monkeypatch.setattr(pictures_module, "check", counted)
    requests = [parsed(*(picture_part(picture_file(8 + k, 8 + n)) for k in range(3))) for n in range(4)]
    tasks = [asyncio.create_task(read(reader, body)) for body in requests]
    try:
        while running < AT_ONCE:
            await asyncio.sleep(0)
    finally:
        both.set()
    for messages, found in await asyncio.gather(*tasks):
        assert len(found) == len(pictures_in(messages)) == 3
    assert most <= AT_ONCE
    # A request with many pictures does not hold the others up: each has one picture in the line.
    assert set(line[:4]) == {8, 9, 10, 11}


async def test_a_request_that_waits_too_long_is_a_503(seeing_proxy, monkeypatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(pictures_module, "check", lambda *_: let_go.wait(30))
    start, engine = seeing_proxy(decode_timeout_s=0.01)
    async with start as proxy:
        try:
            reply = await proxy.post(asked(picture_part(ONE)))
        finally:
            let_go.set()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in reply.headers
        assert engine.sent == []


async def test_a_text_starts_no_thread_and_waits_for_no_memory() -> None:
    reader = PictureReader(PictureSettings(), None)
    await reader.memory.take(reader.memory.most_files)
    body = parsed(text("hello"))
    assert await read(reader, body) == (body.chat.messages, {})
    assert not reader.memory._threads._threads


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_request_larger_than_the_memory_is_a_413(seeing_proxy, path) -> None:
    start, engine = seeing_proxy(**FULL)
    files = [noise(seed) for seed in range(3)]
    body = asked(*map(picture_part, files))
    if path == "/v1/messages":
        sources = (
            {"type": "base64", "media_type": "image/png", "data": base64.b64encode(one).decode()} for one in files
        )
        body = asked(*({"type": "image", "source": source} for source in sources)) | {"model": "m"}
    async with start as proxy:
        reply = await proxy.client.post(path, json=body)
        assert reply.status_code == 413
        assert "pictures.memory_mb" in reply.json()["error"]["message"]
        kind = "request_too_large" if path == "/v1/messages" else "invalid_request_error"
        assert reply.json()["error"]["type"] == kind
        assert engine.sent == proxy.book.log == []
        # The same picture counts once.
        assert (await proxy.post(asked(*[picture_part(files[0])] * 3))).status_code == 200


async def test_a_request_waits_for_its_turn_and_a_text_does_not(seeing_proxy, proxy_over) -> None:
    start, engine = seeing_proxy(**FULL)
    async with start as proxy:
        memory = proxy.deps.pictures.memory
        await memory.take(memory.most_files)
        waits = asyncio.create_task(proxy.post(asked(picture_part(ONE))))
        while not memory._files_line:
            await asyncio.sleep(0)
        assert memory._in_line == len(ONE), "it holds the file alone as it waits"
        assert (await proxy.post(asked(text("hello")))).status_code == 200
        assert not waits.done()
        memory.give_back(files=memory.most_files)
        assert (await waits).status_code == 200
        assert len(engine.sent) == 2
        assert (memory._files, memory._work, memory._in_line) == (0, 0, 0)


async def test_a_turn_that_does_not_come_is_a_503_and_nothing_is_lost(seeing_proxy) -> None:
    start, engine = seeing_proxy(**FULL, decode_timeout_s=0.01)
    async with start as proxy:
        memory = proxy.deps.pictures.memory
        await memory.take(memory.most_files)
        reply = await proxy.post(asked(picture_part(ONE)))
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in reply.headers
        assert engine.sent == proxy.book.log == []
        assert (memory._files, memory._work, memory._in_line) == (memory.most_files, 0, 0)
        memory.give_back(files=memory.most_files)
        memory.join_line(memory.most)
        reply = await proxy.post(asked(picture_part(ONE)))
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in reply.headers


async def test_a_reply_that_runs_holds_each_file_once_and_no_base64(seeing_proxy, monkeypatch) -> None:
    start, engine = seeing_proxy()
    file = noise(1, side=400)
    body = json.dumps(asked(*[picture_part(file)] * 2)).encode()
    is_asked, go_on, own = asyncio.Event(), asyncio.Event(), engine.stream

    async def held(request, tap=None):
        is_asked.set()
        await go_on.wait()
        async for reply in own(request, tap):
            yield reply

    async with start as proxy:
        assert (await proxy.client.post("/v1/chat/completions", content=body)).status_code == 200
        engine.sent.clear()
        proxy.book.requests.clear()
        monkeypatch.setattr(engine, "stream", held)
        tracemalloc.start()
        try:
            task = asyncio.create_task(proxy.client.post("/v1/chat/completions", content=body))
            await is_asked.wait()
            gc.collect()
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held_bytes < 1.3 * len(file) < len(body) / 2
        assert proxy.deps.pictures.memory._files == len(file)
        go_on.set()
        assert (await task).status_code == 200
        assert proxy.deps.pictures.memory._files == 0

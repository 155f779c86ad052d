"""Chats with pictures: exact prompts, what the engine gets, and each refusal."""

import asyncio
import base64
import gc
import hashlib
import io
import json
import random
import threading
import tracemalloc
import zlib

import pytest
from pictures import PictureEngine, data_url, opened, picture_file, picture_part
from PIL import Image

from gpu.vision_model import vision_folder
from openclaw_rl.engines.pictures import PicturePrompt, PictureUrls
from openclaw_rl.messages import Message
from openclaw_rl.models.picture_memory import AT_ONCE, PictureMemory
from openclaw_rl.proxy import pictures as pictures_module
from openclaw_rl.proxy.body import ParsedBody, parse_body
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.proxy.pictures import PictureReader
from openclaw_rl.settings import ModelSettings, PictureSettings
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.types import DropReason
from openclaw_rl.types.pictures import Picture, pictures_in

ONE, TWO = picture_file(32, 24), picture_file(40, 48, shade=90, form="JPEG")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> FrontEnd:
    return FrontEnd(ModelSettings(), vision_folder(tmp_path_factory.mktemp("seeing")))


@pytest.fixture
def seeing_proxy(seeing, proxy_over):
    """`async with seeing_proxy(pictures=…) as (proxy, engine)`."""

    def start(*, refusal=None, trains_pictures=False, **settings):
        engine = PictureEngine(seeing.vision, policy=ToyPolicy(low_id=100, high_id=200))
        reader = PictureReader(PictureSettings(**settings), refusal)
        return proxy_over(seeing, engine=engine, pictures=reader, trains_pictures=trains_pictures), engine

    return start


def asked(*parts, role="user"):
    return {"messages": [{"role": role, "content": list(parts)}], "max_tokens": 4}


def text(said):
    return {"type": "text", "text": said}


async def test_the_prompt_is_the_processors_and_the_engine_gets_one_placeholder_for_a_picture(
    seeing, seeing_proxy
) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    start, engine = seeing_proxy()
    body = asked(text("Compare "), picture_part(ONE), text(" with "), picture_part(TWO, "image/jpeg"), text("."))
    async with start as proxy:
        assert (await proxy.post(body)).status_code == 200
        (request,) = proxy.book.requests
        (turn,) = proxy.book.turns
    folder = vision_folder_of(seeing)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in (ONE, TWO)]
    grid = processor(images=images, return_tensors="pt")["image_grid_thw"]
    counts = [int(row.prod()) // 4 for row in grid]
    pads = [f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts]
    whole = f"<|im_start|>user\nCompare {pads[0]} with {pads[1]}.<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert list(request.prompt_ids) == tokenizer.encode(whole, add_special_tokens=False)
    (sent,) = engine.sent
    assert sent.input_ids.count(seeing.vision.placeholder) == 2
    assert [url.partition(";")[0] for url in sent.image_data] == ["data:image/png", "data:image/png"]
    first, second = (base64.b64decode(url.partition(",")[2]) for url in sent.image_data)
    assert first == ONE
    # A JPEG goes as a PNG: on a GPU SGLang would decode it with the card, and could not count its tokens.
    assert Image.open(io.BytesIO(second)).tobytes() == Image.open(io.BytesIO(TWO)).tobytes()
    assert request.pictures[1].data == TWO
    assert turn.drop is DropReason.UNSUPPORTED_CONTENT


def vision_folder_of(frontend):
    return frontend._tokenizer.name_or_path


async def test_the_recorded_messages_hold_a_reference_and_never_the_bytes(seeing_proxy) -> None:
    start, _ = seeing_proxy(trains_pictures=True)
    async with start as proxy:
        reply = await proxy.post(asked(text("What is this?"), picture_part(ONE)))
        assert reply.json()["usage"]["prompt_tokens"] == len(proxy.book.requests[0].prompt_ids)
        (request,), (turn,) = proxy.book.requests, proxy.book.turns
    digest = hashlib.sha256(ONE).hexdigest()
    assert request.pictures == (Picture(digest, 32, 24),)
    assert request.pictures[0].data == ONE
    assert pictures_in(request.messages) == request.pictures
    stored = request.messages[0].model_dump_json(exclude_unset=True)
    assert base64.b64encode(ONE).decode()[:40] not in stored
    assert base64.b64encode(ONE).decode()[:40] not in repr(request)
    assert turn.drop is None


async def test_a_reply_goes_on_with_the_same_pictures(seeing, seeing_proxy) -> None:
    from openclaw_rl.testing.fake_engine import Scripted

    start, engine = seeing_proxy(trains_pictures=True)
    engine.script(Scripted((101, 102), break_after=2), Scripted((103, 104), finish="length"))
    async with start as proxy:
        assert (await proxy.post(asked(picture_part(ONE)))).status_code == 200
        (turn,) = proxy.book.turns
    first, second = engine.sent
    assert second.input_ids == [*first.input_ids, 101, 102]
    assert second.image_data == first.image_data
    assert (turn.response_ids, turn.drop) == ((101, 102, 103, 104), None)


async def test_a_prompt_that_the_engine_reads_otherwise_is_not_trained_on(seeing, seeing_proxy) -> None:
    start, engine = seeing_proxy(trains_pictures=True)
    engine.drift = 1
    async with start as proxy:
        assert (await proxy.post(asked(picture_part(ONE)))).status_code == 200
        assert proxy.book.turns[0].drop is DropReason.MISALIGNED


async def test_a_reply_with_a_place_for_a_picture_is_not_trained_on(seeing, seeing_proxy) -> None:
    from openclaw_rl.testing.fake_engine import Scripted

    start, engine = seeing_proxy(trains_pictures=True)
    engine.script(Scripted((101, seeing.vision.placeholder, 102), finish="length"))
    async with start as proxy:
        assert (await proxy.post(asked(picture_part(ONE)))).status_code == 200
        assert proxy.book.turns[0].drop is DropReason.MISALIGNED


async def test_a_stream_shows_the_same_tokens(seeing_proxy) -> None:
    start, _ = seeing_proxy(trains_pictures=True)
    async with start as proxy:
        events = await proxy.events(asked(picture_part(ONE)))
        assert events[-1] == {}
        assert proxy.book.turns[0].drop is None


async def test_results_of_parallel_calls_keep_their_own_pictures(seeing, seeing_proxy) -> None:
    start, engine = seeing_proxy()
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for name in ("first", "second")
    ]
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "second", "content": [picture_part(TWO, "image/jpeg")]},
        {"role": "tool", "tool_call_id": "first", "content": [picture_part(ONE)]},
    ]
    async with start as proxy:
        reply = await proxy.post({"messages": messages, "max_tokens": 4})
        assert reply.status_code == 200, reply.text
        assert [opened(url).size for url in engine.sent[0].image_data] == [(32, 24), (40, 48)]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_the_other_dialects_ask_the_same(seeing_proxy, path) -> None:
    start, engine = seeing_proxy()
    async with start as proxy:
        await proxy.post(asked(text("see "), picture_part(ONE)))
        if path == "/v1/responses":
            parts = [{"type": "input_text", "text": "see "}, {"type": "input_image", "image_url": data_url(ONE)}]
            body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4}
        else:
            source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()}
            parts = [{"type": "text", "text": "see "}, {"type": "image", "source": source}]
            body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
        reply = await proxy.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        first, second = engine.sent
        assert (second.input_ids, second.image_data) == (first.input_ids, first.image_data)
        if path == "/v1/messages":
            count = await proxy.client.post("/v1/messages/count_tokens", json=body)
            assert count.json()["input_tokens"] == len(proxy.book.requests[0].prompt_ids)


async def test_a_picture_in_a_tools_result_of_anthropics_dialect(seeing_proxy) -> None:
    start, engine = seeing_proxy()
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": source}]},
                {"type": "text", "text": "<system-reminder>short</system-reminder>"},
            ],
        },
    ]
    async with start as proxy:
        reply = await proxy.client.post("/v1/messages", json={"model": "m", "max_tokens": 4, "messages": messages})
        assert reply.status_code == 200, reply.text
        assert len(engine.sent[0].image_data) == 1


def with_broken_chunk(png: bytes) -> bytes:
    """Return the PNG with a chunk of a colour profile behind its pixels that is too short."""
    end = png.rindex(b"IEND") - 4
    chunk = b"cHRM" + b"\0" * 3
    return png[:end] + (3).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") + png[end:]


def animated():
    frames = [Image.new("RGB", (8, 8), shade) for shade in ("red", "blue")]
    out = io.BytesIO()
    frames[0].save(out, "WEBP", save_all=True, append_images=frames[1:])
    return out.getvalue()


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("https://example.org/a.png", "invalid_image_url", "fetches no URL"),
        ("file:///etc/passwd", "invalid_image_url", "is a data: URL"),
        ("sha256:" + "0" * 64, "invalid_image_url", "is a data: URL"),
        ("data:image/gif;base64,R0lGODdh", "invalid_image_url", "PNG, JPEG or WebP"),
        ("data:image/png;base64,***", "image_parse_error", "not base64"),
        (data_url(b"no picture at all"), "image_parse_error", "no PNG, JPEG or WebP"),
        (data_url(ONE[:60]), "image_parse_error", "cut off"),
        (data_url(with_broken_chunk(ONE)), "image_parse_error", "no PNG, JPEG or WebP"),
        (data_url(animated(), "image/webp"), "image_parse_error", "more than one frame"),
        (data_url(picture_file(200, 200)), "image_too_large", "pictures.max_pixels"),
        (data_url(picture_file(60, 60, form="PNG", compress_level=0)), "image_too_large", "pictures.max_mb"),
        (data_url(picture_file(40, 40, form="JPEG") + b"\xff\xda" * 99, "image/jpeg"), "image_parse_error", "scans"),
        (data_url(picture_file()[:-12]), "image_parse_error", "cut off"),
    ],
)
async def test_a_picture_that_cannot_be_taken_is_a_400(seeing_proxy, url, code, says) -> None:
    start, engine = seeing_proxy(max_pixels=10_000, max_mb=0.01)
    async with start as proxy:
        reply = await proxy.post(asked(text("x"), {"type": "image_url", "image_url": {"url": url}}))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, code, "messages[0].content[1]")
        assert says in error["message"]
        assert engine.sent == proxy.book.log == []


async def test_the_first_frame_of_a_phones_jpeg_is_the_picture(seeing_proxy) -> None:
    frames = [Image.new("RGB", (40, 24), shade) for shade in ("red", "blue")]
    out = io.BytesIO()
    frames[0].save(out, "MPO", save_all=True, append_images=frames[1:])
    start, engine = seeing_proxy()
    async with start as proxy:
        reply = await proxy.post(asked(picture_part(out.getvalue(), "image/jpeg")))
        assert reply.status_code == 200, reply.text
        sent = base64.b64decode(engine.sent[0].image_data[0].partition(",")[2])
    red, _, blue = Image.open(io.BytesIO(sent)).getpixel((0, 0))
    assert red > 200 > 50 > blue


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (
            "/v1/responses",
            {
                "instructions": "Be brief.",
                "input": [
                    {"role": "user", "content": "hello"},
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "look"},
                            {"type": "input_image", "image_url": data_url(ONE)},
                        ],
                    },
                ],
            },
            "input[1].content[1]",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 4,
                "system": "Be brief.",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "look"},
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": base64.b64encode(ONE).decode(),
                                },
                            },
                        ],
                    }
                ],
            },
            "messages[0].content[1]",
        ),
    ],
)
async def test_a_refused_picture_has_its_place_in_the_clients_own_body(seeing_proxy, path, body, place) -> None:
    start, engine = seeing_proxy(refusal="this model reads text only")
    async with start as proxy:
        reply = await proxy.client.post(path, json={"model": "m", **body})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith(f"{place}: a picture")
        assert engine.sent == []


async def test_more_pictures_than_a_request_may_have(seeing_proxy) -> None:
    start, _ = seeing_proxy(max_per_request=1)
    async with start as proxy:
        error = (await proxy.post(asked(picture_part(ONE), picture_part(ONE)))).json()["error"]
        assert (error["code"], error["param"]) == ("too_many_images", "messages[0].content[1]")


@pytest.mark.parametrize("typed", ["<|image_pad|>", "<|video_pad|>"])
async def test_words_that_an_engine_would_take_for_a_picture_are_refused_beside_one(seeing_proxy, typed) -> None:
    start, engine = seeing_proxy()
    async with start as proxy:
        reply = await proxy.post(asked(text(f"what is {typed}?"), picture_part(ONE)))
        assert reply.status_code == 400
        assert "own mark of a picture" in reply.json()["error"]["message"]
        assert (await proxy.post(asked(text(f"what is {typed}?")))).status_code == 200
        assert engine.sent[0].image_data is None


async def test_a_server_that_takes_no_pictures_says_why(qwen, seeing_proxy, proxy_over) -> None:
    start, engine = seeing_proxy(refusal="pictures are switched off (pictures.enabled)")
    async with start as proxy:
        error = (await proxy.post(asked(picture_part(ONE)))).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_content", "messages[0].content[0]")
        assert "pictures.enabled" in error["message"]
        assert engine.sent == []
    assert qwen.vision is None
    assert "reads text only" in qwen.why_blind


async def test_a_reference_is_refused_where_no_engine_gets_the_picture(seeing, seeing_proxy) -> None:
    from openclaw_rl.errors import RequestError

    said = Message(role="user", content=[Picture("0" * 64, 32, 24).part()])
    with pytest.raises(RequestError, match="reads text only here"):
        seeing.render([said])
    assert seeing.render([said], shows_pictures=True).pictures == (Picture("0" * 64, 32, 24),)


def test_a_prompt_of_an_engine_has_one_place_for_each_picture() -> None:
    memory = PictureMemory(PictureSettings())
    pictures = (Picture("a" * 64, 1, 1, b"\x89PNG..."), Picture("b" * 64, 1, 1, b"RIFF..."))
    sent = PicturePrompt.of((9, 9, 1, 9, 2), PictureUrls(pictures, memory), 9)
    assert sent.ids == [9, 1, 9, 2]
    assert "base64" not in repr(sent)
    with pytest.raises(ValueError, match="2 pictures, and 1 places"):
        PicturePrompt.of((9, 9), PictureUrls(pictures, memory), 9)
    with pytest.raises(ValueError, match="are not here"):
        list(PictureUrls((Picture("a" * 64, 1, 1),), memory))
    assert [url.partition(";")[0] for url in sent.image_data] == ["data:image/png", "data:image/webp"]
    assert sent.image_data[1:] == [sent.image_data[1]]
    assert sent.image_data == PictureUrls(pictures, memory) != PictureUrls(pictures[:1], memory)
    assert len({sent.image_data, PictureUrls(pictures, memory)}) == 1


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


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


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


def noise(seed: int, form: str = "PNG", side: int = 40, **options) -> bytes:
    """Return a picture that no packing makes smaller."""
    out = io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side)).save(out, form, **options)
    return out.getvalue()


FULL = {"max_pixels": 1600, "memory_mb": 1.05}
"""Room for some 13 KB of files, beside the work on one picture."""


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


def exif_turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    Image.open(io.BytesIO(TWO)).save(out, "JPEG", exif=exif)
    return out.getvalue()


def cmyk() -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(TWO)).convert("CMYK").save(out, "JPEG")
    return out.getvalue()


@pytest.mark.parametrize("data", [exif_turned(), cmyk()], ids=["exif", "cmyk"])
async def test_the_engine_and_the_trainer_see_the_same_pixels_of_a_jpeg(seeing_proxy, data) -> None:
    start, engine = seeing_proxy()
    async with start as proxy:
        assert (await proxy.post(asked(picture_part(data, "image/jpeg")))).status_code == 200
        (request,) = proxy.book.requests
    seen = opened(engine.sent[0].image_data[0])
    # The trainer opens the ledger's file so: no turn that EXIF asks for.
    trained = Image.open(io.BytesIO(request.pictures[0].data)).convert("RGB")
    assert seen.tobytes() == trained.tobytes()
    assert seen.size == trained.size == (request.pictures[0].width, request.pictures[0].height) == (40, 48)
    assert not seen.getexif()
    assert "icc_profile" not in seen.info


def deep(mode: str) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (32, 24), 40_000).save(out, "PNG")
    return out.getvalue()


def palette() -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(ONE)).quantize(8).save(out, "PNG", transparency=0)
    return out.getvalue()


async def test_a_png_of_a_palette_goes_to_the_engine_as_it_came(seeing_proxy) -> None:
    start, engine = seeing_proxy()
    async with start as proxy:
        assert (await proxy.post(asked(picture_part(palette())))).status_code == 200
        assert base64.b64decode(engine.sent[0].image_data[0].partition(",")[2]) == palette()


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'


def text_bomb() -> bytes:
    """Return a PNG whose text becomes 8 MB as it is read."""
    packed = zlib.compress(bytes(2**23), 9)
    return ONE[:33] + chunk(b"zTXt", b"Comment\0\0" + packed) + ONE[33:]


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        (data_url(SVG, "image/svg+xml"), "invalid_image_url", "PNG, JPEG or WebP"),
        (data_url(SVG, "image/png"), "image_parse_error", "no PNG, JPEG or WebP"),
        (data_url(b"GIF89a" + bytes(30), "image/png"), "image_parse_error", "no PNG, JPEG or WebP"),
        ("data:image/png," + "%89PNG", "invalid_image_url", "in base64"),
        ("data:;base64,AAAA", "invalid_image_url", "PNG, JPEG or WebP"),
        ("ftp://example.org/a.png", "invalid_image_url", "is a data: URL"),
        (data_url(TWO[: len(TWO) // 2], "image/jpeg"), "image_parse_error", "no PNG, JPEG or WebP"),
        (data_url(deep("I;16")), "image_parse_error", "send it in 8 bits"),
        (data_url(text_bomb()), "image_parse_error", "no PNG, JPEG or WebP"),
        ("data:image/png" + ";a=b" * 5 + ";base64,AAAA", "invalid_image_url", "is a data: URL"),
    ],
)
async def test_more_that_is_no_picture(seeing_proxy, url, code, says) -> None:
    start, engine = seeing_proxy()
    async with start as proxy:
        reply = await proxy.post(asked({"type": "image_url", "image_url": {"url": url}}))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, code, "messages[0].content[0]")
        assert says in error["message"]
        assert engine.sent == proxy.book.log == []


@pytest.mark.parametrize("begin", ["data:image/png;charset=utf-8;base64,", "DATA:image/PNG;name=a.png;base64,"])
async def test_a_data_url_may_have_parameters(seeing_proxy, begin) -> None:
    start, engine = seeing_proxy()
    url = begin + base64.b64encode(ONE).decode()
    async with start as proxy:
        assert (await proxy.post(asked({"type": "image_url", "image_url": {"url": url}}))).status_code == 200
        assert list(engine.sent[0].image_data) == [data_url(ONE)]


async def test_a_reference_to_the_picture_of_another_chat_opens_nothing(seeing_proxy) -> None:
    start, engine = seeing_proxy()
    async with start as proxy:
        assert (await proxy.post(asked(picture_part(ONE)))).status_code == 200
        stolen = Picture(hashlib.sha256(ONE).hexdigest(), 32, 24).part().model_dump()
        for body in (asked(stolen), asked(picture_part(TWO, "image/jpeg"), stolen)):
            error = (await proxy.post(body)).json()["error"]
            assert error["code"] == "invalid_image_url"
        assert len(engine.sent) == 1


async def test_a_picture_in_the_system_prompt_and_in_a_reply_has_its_place(seeing_proxy) -> None:
    start, engine = seeing_proxy()
    messages = [
        {"role": "system", "content": [text("see"), picture_part(ONE)]},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [picture_part(TWO, "image/jpeg")]},
        {"role": "user", "content": "and?"},
    ]
    async with start as proxy:
        assert (await proxy.post({"messages": messages, "max_tokens": 4})).status_code == 200
        assert [opened(url).size for url in engine.sent[0].image_data] == [(32, 24), (40, 48)]


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (
            "/v1/responses",
            {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": data_url(ONE)}]}]},
            "input[0].content[0]",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 4,
                "system": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}],
                "messages": [{"role": "user", "content": "hello"}],
            },
            "system[0]",
        ),
    ],
)
async def test_a_picture_where_a_dialect_has_none_is_refused_by_its_place(seeing_proxy, path, body, place) -> None:
    start, engine = seeing_proxy()
    async with start as proxy:
        reply = await proxy.client.post(path, json={"model": "m", **body})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith(f"{place}: a picture: only a user or a tool may show one")
        assert engine.sent == []


async def test_a_picture_in_a_tools_result_of_the_responses_dialect(seeing_proxy) -> None:
    start, engine = seeing_proxy()
    output = [{"type": "input_image", "image_url": data_url(ONE)}]
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]
    async with start as proxy:
        reply = await proxy.client.post("/v1/responses", json={"model": "m", "input": items, "max_output_tokens": 4})
        assert reply.status_code == 200, reply.text
        assert list(engine.sent[0].image_data) == [data_url(ONE)]

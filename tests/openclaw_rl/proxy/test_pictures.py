"""Chats with pictures: exact prompts, what the engine gets, and what is recorded."""

import base64
import hashlib
import io

import pytest
from pictures import ONE, TWO, asked, data_url, opened, picture_part, text
from PIL import Image

from openclaw_rl.engines.pictures import PicturePrompt, PictureUrls
from openclaw_rl.models.picture_memory import PictureMemory
from openclaw_rl.settings import PictureSettings
from openclaw_rl.types import DropReason
from openclaw_rl.types.pictures import Picture, pictures_in


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


@pytest.mark.parametrize("what", ["picture", "video"])
async def test_a_reply_with_a_place_for_a_picture_is_not_trained_on(seeing, seeing_proxy, what: str) -> None:
    from openclaw_rl.testing.fake_engine import Scripted

    start, engine = seeing_proxy(trains_pictures=True)
    (video,) = seeing.vision.reserved - {seeing.vision.placeholder}
    place = seeing.vision.placeholder if what == "picture" else video
    engine.script(Scripted((101, place, 102), finish="length"))
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


def palette() -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(ONE)).quantize(8).save(out, "PNG", transparency=0)
    return out.getvalue()


async def test_a_png_of_a_palette_goes_to_the_engine_as_it_came(seeing_proxy) -> None:
    start, engine = seeing_proxy()
    async with start as proxy:
        assert (await proxy.post(asked(picture_part(palette())))).status_code == 200
        assert base64.b64decode(engine.sent[0].image_data[0].partition(",")[2]) == palette()


@pytest.mark.parametrize("begin", ["data:image/png;charset=utf-8;base64,", "DATA:image/PNG;name=a.png;base64,"])
async def test_a_data_url_may_have_parameters(seeing_proxy, begin) -> None:
    start, engine = seeing_proxy()
    url = begin + base64.b64encode(ONE).decode()
    async with start as proxy:
        assert (await proxy.post(asked({"type": "image_url", "image_url": {"url": url}}))).status_code == 200
        assert list(engine.sent[0].image_data) == [data_url(ONE)]


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

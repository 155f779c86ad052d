"""Pictures that a chat cannot have: each refusal, its code and its place in the client's own body."""

import base64
import hashlib
import io
import zlib

import pytest
from pictures import ONE, TWO, asked, chunk, data_url, picture_file, picture_part, text
from PIL import Image

from openclaw_rl.messages import Message
from openclaw_rl.types.pictures import Picture


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


def deep(mode: str) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (32, 24), 40_000).save(out, "PNG")
    return out.getvalue()


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'


def text_bomb() -> bytes:
    """Return a PNG whose text becomes 8 MB as it is read."""
    packed = zlib.compress(bytes(2**23), 9)
    return ONE[:33] + chunk(b"zTXt", b"Comment\0\0" + packed) + ONE[33:]


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
async def test_a_picture_that_cannot_be_taken_is_a_400(seeing_proxy, url, code, says) -> None:
    start, engine = seeing_proxy(max_pixels=10_000, max_mb=0.01)
    async with start as proxy:
        reply = await proxy.post(asked(text("x"), {"type": "image_url", "image_url": {"url": url}}))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, code, "messages[0].content[1]")
        assert says in error["message"]
        assert engine.sent == proxy.book.log == []


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


async def test_a_reference_to_the_picture_of_another_chat_opens_nothing(seeing_proxy) -> None:
    start, engine = seeing_proxy()
    async with start as proxy:
        assert (await proxy.post(asked(picture_part(ONE)))).status_code == 200
        stolen = Picture(hashlib.sha256(ONE).hexdigest(), 32, 24).part().model_dump()
        for body in (asked(stolen), asked(picture_part(TWO, "image/jpeg"), stolen)):
            error = (await proxy.post(body)).json()["error"]
            assert error["code"] == "invalid_image_url"
        assert len(engine.sent) == 1

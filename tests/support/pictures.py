"""Pictures for a random Qwen3-VL, and a stand-in for an engine that takes them."""

import base64
import io
import zlib
from collections.abc import AsyncGenerator
from typing import Any

from PIL import Image

from openclaw_rl.engines.base import Tap
from openclaw_rl.engines.dialect import GenerateReply, GenerateRequest
from openclaw_rl.errors import EngineRefused
from openclaw_rl.models.vision import Vision
from openclaw_rl.testing import FakeEngine, ToyPolicy


def picture_file(width: int = 32, height: int = 24, *, shade: int = 0, form: str = "PNG", **options: Any) -> bytes:
    """Return the file of a picture whose pixels depend on `shade`."""
    image = Image.new("RGB", (width, height))
    image.putdata([((x * 7 + shade) % 256, (y * 11 + shade) % 256, shade) for y in range(height) for x in range(width)])
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


ONE, TWO = picture_file(32, 24), picture_file(40, 48, shade=90, form="JPEG")


def data_url(data: bytes, media: str = "image/png") -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def picture_part(data: bytes, media: str = "image/png") -> dict[str, object]:
    """Return a part of a chat message, as OpenAI's clients send it."""
    return {"type": "image_url", "image_url": {"url": data_url(data, media)}}


class PictureEngine(FakeEngine):
    """A fake engine that reads pictures as SGLang does, and is stricter where SGLang would guess.

    One placeholder of the ids stands for each picture, which is decoded; else the request is refused, also for a
    placeholder without a picture. The placeholder becomes as many ids as the picture has tokens. They are hashes of its
    pixels, so that every log-prob behind a picture depends on it.
    """

    hashes_pixels = True
    """False: the ids stay placeholders, for a model that computes them."""

    def __init__(self, vision: Vision, *, policy: ToyPolicy | None = None) -> None:
        super().__init__(policy=policy)
        self.vision = vision
        self.sent: list[GenerateRequest] = []
        """The requests for replies as they came."""
        self.scored: list[GenerateRequest] = []
        """The requests for log-probs of given ids."""
        self.drift = 0
        """Tokens by which the engine's prompt is longer than it should be."""

    async def stream(self, request: GenerateRequest, tap: Tap | None = None) -> AsyncGenerator[GenerateReply, None]:
        self.sent.append(request)
        async for reply in super().stream(self._seen(request), tap):
            yield reply

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if request.logprob_start_len < 0:
            return await super().generate(request)
        self.scored.append(request)
        return await super().generate(self._seen(request))

    def _seen(self, request: GenerateRequest) -> GenerateRequest:
        if not request.image_data and self.vision.placeholder not in request.input_ids:
            return request
        return request.model_copy(update={"input_ids": self._expanded(request)})

    def _expanded(self, request: GenerateRequest) -> list[int]:
        pictures = [opened(url) for url in request.image_data or ()]
        if request.input_ids.count(self.vision.placeholder) != len(pictures):
            raise EngineRefused("the prompt's placeholders are not the pictures", status=400)
        ids: list[int] = []
        for token in request.input_ids:
            if token != self.vision.placeholder:
                ids.append(token)
                continue
            picture = pictures.pop(0)
            mark = zlib.crc32(picture.convert("RGB").tobytes()) >> 1 if self.hashes_pixels else token
            ids += [mark] * self.vision.tokens(*picture.size)
        return [*ids, *[ids[-1]] * self.drift]


def opened(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def asked(*parts: object, role: str = "user") -> dict[str, Any]:
    """Return the body of a chat whose only message has these parts."""
    return {"messages": [{"role": role, "content": list(parts)}], "max_tokens": 4}


def text(said: str) -> dict[str, object]:
    return {"type": "text", "text": said}


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    """Return a chunk of a PNG file."""
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

"""Pictures for a random Qwen3-VL, and a stand-in for an engine that takes them."""

import base64
import io
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


def data_url(data: bytes, media: str = "image/png") -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def picture_part(data: bytes, media: str = "image/png") -> dict[str, object]:
    """Return a part of a chat message, as OpenAI's clients send it."""
    return {"type": "image_url", "image_url": {"url": data_url(data, media)}}


class PictureEngine(FakeEngine):
    """A fake engine that expands placeholders as SGLang does: one for each picture, else the request is refused."""

    def __init__(self, vision: Vision, *, policy: ToyPolicy | None = None) -> None:
        super().__init__(policy=policy)
        self._vision = vision
        self.sent: list[GenerateRequest] = []
        """The requests as they came."""
        self.drift = 0
        """Tokens by which the engine's prompt is longer than it should be."""

    async def stream(self, request: GenerateRequest, tap: Tap | None = None) -> AsyncGenerator[GenerateReply, None]:
        self.sent.append(request)
        if request.image_data:
            request = request.model_copy(update={"input_ids": self._expanded(request)})
        async for reply in super().stream(request, tap):
            yield reply

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if request.image_data and request.logprob_start_len >= 0:
            request = request.model_copy(update={"input_ids": self._expanded(request)})
        return await super().generate(request)

    def _expanded(self, request: GenerateRequest) -> list[int]:
        pictures = [opened(url) for url in request.image_data or ()]
        if request.input_ids.count(self._vision.placeholder) != len(pictures):
            raise EngineRefused("the prompt's placeholders are not the pictures", status=400)
        ids: list[int] = []
        for token in request.input_ids:
            count = self._vision.tokens(*pictures.pop(0).size) if token == self._vision.placeholder else 1
            ids += [token] * count
        return [*ids, *[ids[-1]] * self.drift]


def opened(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))

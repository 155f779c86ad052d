"""An engine over HTTP for the random Qwen3-VL: transformers computes every token, with pictures and adapters."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from peft import PeftModel
from pictures import PictureEngine, opened
from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

from openclaw_rl.engines.base import Tap
from openclaw_rl.engines.dialect import GenerateReply, GenerateRequest, ModelInfo
from openclaw_rl.models.identity import hash_tensors
from openclaw_rl.models.vision import Vision
from openclaw_rl.testing.stub_engine import stub_app
from openclaw_rl.types import LogProbs


class VisionPolicy:
    """The model in the place of `ToyPolicy`: the same calls, with real numbers at temperature 1."""

    def __init__(self, folder: Path) -> None:
        self._base = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor = AutoImageProcessor.from_pretrained(folder)
        self._dice = torch.Generator().manual_seed(0)
        self._adapted: dict[int, Any] = {}
        self._folder = folder
        self.end_id = -1  # replies run to their limit
        self.images: list[Any] = []
        """Pictures of the request that runs."""

    def add(self, seed: int, adapter: Path) -> None:
        base = Qwen3VLForConditionalGeneration.from_pretrained(self._folder, dtype=torch.float32)
        self._adapted[seed] = PeftModel.from_pretrained(base, adapter).eval()

    @torch.no_grad()
    def _logits(self, ids: Sequence[int], seed: int) -> torch.Tensor:
        row = torch.tensor([list(ids)])
        more: dict[str, Any] = {}
        places = row == self._base.config.image_token_id
        if bool(places.any()):
            more = dict(self._processor(images=self.images, return_tensors="pt"))
            more["mm_token_type_ids"] = places.int()
        model = self._adapted.get(seed, self._base)
        return torch.log_softmax(model(input_ids=row, **more).logits[0].float(), -1)

    def next_token(self, ids: Sequence[int], seed: int) -> int:
        return int(torch.multinomial(self._logits(ids, seed)[-1, :256].exp(), 1, generator=self._dice))

    def log_prob(self, ids: Sequence[int], position: int, seed: int) -> float:
        return float(self._logits(ids[: position + 1], seed)[position - 1, ids[position]])

    def log_probs(self, ids: Sequence[int], start: int, seed: int) -> LogProbs:
        logits = self._logits(ids, seed)
        return tuple(float(logits[at - 1, ids[at]]) for at in range(start, len(ids)))


class VisionEngine(PictureEngine):
    """One request at a time."""

    hashes_pixels = False

    def __init__(self, folder: Path) -> None:
        self.real = VisionPolicy(folder)
        super().__init__(Vision.of(folder), policy=self.real)  # type: ignore[arg-type]
        self._folder, self._one = folder, asyncio.Lock()

    async def stream(self, request: GenerateRequest, tap: Tap | None = None) -> AsyncGenerator[GenerateReply, None]:
        async with self._one:
            self.real.images = [opened(url).convert("RGB") for url in request.image_data or ()]
            async for reply in super().stream(request, tap):
                yield reply

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if request.logprob_start_len < 0:
            return await super().generate(request)
        async with self._one:
            self.real.images = [opened(url).convert("RGB") for url in request.image_data or ()]
            return await super().generate(request)

    async def load_adapter(self, name: str, folder: Path) -> None:
        await super().load_adapter(name, folder)
        self.real.add(self.adapters[name], folder)

    async def model_info(self) -> ModelInfo:
        found = await super().model_info()
        return found.model_copy(update={"model_path": str(self._folder), "base_hash": hash_tensors(self._folder)})


@contextmanager
def running_vision_engine(folder: Path) -> Iterator[tuple[VisionEngine, str]]:
    """Serve the engine from a thread of this process; yield it and its URL."""
    engine = VisionEngine(folder)
    listener = socket.create_server(("127.0.0.1", 0))
    runner = uvicorn.Server(uvicorn.Config(stub_app(engine), log_level="error", lifespan="off"))
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield engine, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        runner.should_exit = True
        thread.join(30)

"""A tiny Qwen3-VL with random weights, pictures for it, and a stand-in for an engine that takes pictures."""

import base64
import io
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from openclaw_rl.engines.base import Tap
from openclaw_rl.engines.dialect import GenerateReply, GenerateRequest
from openclaw_rl.errors import EngineRefused
from openclaw_rl.models.vision import Vision
from openclaw_rl.testing import FakeEngine, ToyPolicy

TEMPLATE = """\
{%- macro shown(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {{- shown(message.content) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
PATCH, MERGE = 4, 2
LEAST, MOST = 4 * 64, 36 * 64
"""Pixels of the smallest and of the largest scaled picture: 4 and 36 tokens."""


def vision_folder(folder: Path) -> Path:
    """Write tokenizer, template and configs of the model, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = {text: number for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": PATCH,
            "merge_size": MERGE,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": LEAST, "longest_edge": MOST},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 3,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    }
    _write(folder / "config.json", config)
    return folder


def vision_model(folder: Path, seed: int = 0) -> Path:
    """Write the folder with random weights."""
    import torch
    from transformers import AutoConfig, Qwen3VLForConditionalGeneration

    vision_folder(folder)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():  # larger than the usual start, so that a picture changes answers visibly
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.dim() > 1 else parameter
    model.save_pretrained(folder)
    return folder


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


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

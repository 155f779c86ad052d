"""A Qwen3-VL with random weights, for checks without a download: tiny for a CPU, and of kernels' sizes for a card."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

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
MERGE = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. A picture has at least `least` and at most `most` tokens."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    axes: tuple[int, int, int]
    """Shares of the rotary pairs for time, height and width; their sum is half of `head_dim`."""
    vision_hidden: int
    vision_heads: int
    patch: int
    least: int
    most: int
    context: int


TINY = Shape(32, 48, 3, 4, 2, 8, (2, 1, 1), 24, 2, patch=4, least=4, most=36, context=2048)
CARD = Shape(1024, 2048, 6, 16, 8, 128, (24, 20, 20), 256, 4, patch=16, least=64, most=4096, context=8192)
"""Heads of 128 and patches of 16, as Qwen3-VL itself."""


def vision_folder(folder: Path, shape: Shape = TINY) -> Path:
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
    square = (shape.patch * MERGE) ** 2
    _write(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": shape.patch,
            "merge_size": MERGE,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": shape.least * square, "longest_edge": shape.most * square},
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
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.context,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": list(shape.axes),
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 3,
            "hidden_size": shape.vision_hidden,
            "intermediate_size": 2 * shape.vision_hidden,
            "num_heads": shape.vision_heads,
            "in_channels": 3,
            "patch_size": shape.patch,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": shape.hidden,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    }
    _write(folder / "config.json", config)
    return folder


def vision_model(folder: Path, shape: Shape = TINY, *, seed: int = 0) -> Path:
    """Write the folder with random fp32 weights."""
    vision_folder(folder, shape)
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(folder))
    # Larger than at the usual start, so that a picture and an adapter change answers visibly. In the large one the
    # head alone, for deep random layers would overflow 16 bits.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and (shape is TINY or name.startswith("lm_head")):
                parameter.mul_(4 if shape is TINY else 2)
    model.save_pretrained(folder)
    return folder


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))

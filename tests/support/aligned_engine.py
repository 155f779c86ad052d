"""The embedded engine in a process of its own with a random adapter, beside the same model in transformers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from openclaw_opd.settings import OpdSettings
from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.messages import Message
from openclaw_rl.methods.base import ScoringTools
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import EngineSettings, ModelSettings
from openclaw_rl.types import Ids

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}\
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    model: Path
    adapter: Path
    frontend: FrontEnd
    references: dict[bool, Any]
    """The model as transformers runs it, without and with the adapter."""
    teacher: Any = None
    """Another adapter that the teacher reads under."""

    def plain(self, prompt: Ids, response: Ids, *, adapter: bool, is_teacher: bool = False) -> torch.Tensor:
        """log-softmax of the logits before each response token, by transformers alone, [T, V]."""
        model = self.teacher if is_teacher and self.teacher is not None else self.references[adapter]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0].float()
        return logits[len(prompt) - 1 : -1].log_softmax(-1)


def make_model(root: Path) -> Path:
    folder = root / "model"
    alphabet = {character: k for k, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    torch.manual_seed(0)
    end = tokenizer.token_to_id("<|im_end|>")
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        eos_token_id=end,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@contextmanager
def serve(root: Path, model: Path, settings: ModelSettings) -> Iterator[Served]:
    """The embedded engine on this model, and a random adapter for it."""
    torch.manual_seed(0)
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    adapter, port_file = root / "adapter", root / "port.json"
    base, other = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    with_adapter = get_peft_model(other, lora).eval()
    with_adapter.save_pretrained(adapter)
    config = {
        "model": {"path": str(model)},
        "engine": {"threads": 1, "max_running": 8, "prefill_chunk": 64, "cache_tokens": 4096},
        "cache_dir": str(root / "cache"),
        "port_file": str(port_file),
    }
    (root / "engine.json").write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "openclaw_rl.engines.embedded", "--config", str(root / "engine.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        end = time.monotonic() + 120
        while not port_file.exists():
            assert process.poll() is None, "the engine died while starting"
            assert time.monotonic() < end, "the engine did not start"
            time.sleep(0.05)
        url = json.loads(port_file.read_text())["url"]
        yield Served(url, model, adapter, FrontEnd(settings, model), {False: base.eval(), True: with_adapter})
    finally:
        process.terminate()
        process.wait(120)


@asynccontextmanager
async def scoring(served: Served) -> AsyncIterator[ScoringTools]:
    """Version 1, the adapter, serves."""
    engine = HttpEngine(served.url, settings=EngineSettings())
    await engine.load_adapter("policy-v1", served.adapter)
    serving = VersionAdmission(hold_s=120.0)
    serving.switch(1, "policy-v1")

    def render(messages: Sequence[Message], tools_json: str | None, kwargs_json: str | None) -> Ids:
        offered = json.loads(tools_json) if tools_json else None
        return served.frontend.render(messages, offered, json.loads(kwargs_json or "{}")).ids

    method = OpdSettings(teacher="policy", top_k=5)
    yield ScoringTools(method, engine, serving, render, context_length=CONTEXT)
    await engine.unload_adapter("policy-v1")
    await engine.aclose()

"""Tiny random models and adapters of several architectures, and a scheduler that a test drives by hand."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.engines.embedded.jobs import Job
from openclaw_rl.engines.embedded.process import load_runner
from openclaw_rl.engines.embedded.runner import Adapter, Runner
from openclaw_rl.engines.embedded.scheduler import Scheduler
from openclaw_rl.engines.embedded.wire import Limits, make_job, progress
from openclaw_rl.settings import EngineSettings, ModelSettings

VOCAB, CONTEXT = 320, 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**COMMON, num_key_value_heads=2, tie_word_embeddings=True),
    "llama3_rope": lambda: LlamaConfig(
        **COMMON,
        num_key_value_heads=3,
        attention_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=None, head_dim=16),
    "qwen2": lambda: Qwen2Config(**COMMON, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=16),
    # Two that the hand-written forward does not know.
    "gpt_neox": lambda: GPTNeoXConfig(**COMMON),
    "gemma2": lambda: Gemma2Config(
        **COMMON,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=64,
        attn_logit_softcapping=1.5,  # low, so that a forward without it is far off
    ),
}
TARGETS = {"gpt_neox": ["query_key_value", "dense_4h_to_h"]}
ALL_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Tiny:
    """A model folder, two adapter folders, and the plain forward passes they are held against."""

    architecture: str
    folder: Path
    adapters: dict[str, Path]

    def log_probs(
        self, adapter: str | None, ids: list[int], temperature: float = 1.0, *, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """log_softmax(logits / T) after every id, [len(ids), V]."""
        model = _reference(self.folder, self.adapters[adapter] if adapter else None, dtype)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        return (logits / temperature).log_softmax(-1)

    def rounding(self, adapter: str | None, ids: list[int], temperature: float = 1.0) -> float:
        """The largest difference between a plain forward in fp32 and one in float64, on this machine."""
        plain, exact = (self.log_probs(adapter, ids, temperature, dtype=t) for t in (torch.float32, torch.float64))
        return (plain - exact).abs().max().item()

    def off(self, adapter: str | None, ids: list[int], log_probs: list[float], temperature: float = 1.0) -> float:
        """The largest error of the log-probs of the last ids, in units of `rounding`: 1 is a plain fp32 forward's."""
        exact = self.log_probs(adapter, ids, temperature, dtype=torch.float64)[-len(log_probs) - 1 : -1]
        picked = exact.gather(-1, torch.tensor(ids[-len(log_probs) :])[:, None])[:, 0]
        error = (torch.tensor(log_probs, dtype=torch.float64) - picked).abs().max().item()
        return error / self.rounding(adapter, ids, temperature)


@functools.cache
def _reference(folder: Path, adapter: Path | None, dtype: torch.dtype) -> PreTrainedModel:
    # `eager`: transformers' other attentions drop a soft cap
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return (PeftModel.from_pretrained(model, adapter) if adapter else model).eval().to(dtype)


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    made: dict[str, Tiny] = {}

    def make(architecture: str) -> Tiny:
        if architecture not in made:
            root = tmp_path_factory.mktemp(architecture)
            torch.manual_seed(len(architecture))
            model = AutoModelForCausalLM.from_config(CONFIGS[architecture]())
            for name, parameter in model.named_parameters():
                if "bias" in name or "norm" in name:  # fresh ones are 0 and 1: a forward that forgets them would pass
                    torch.nn.init.normal_(parameter, 1.0 if "weight" in name else 0.0, 0.3)
            model.save_pretrained(root / "model")
            adapters = {}
            for name, pattern in {
                "one": {},
                "two": {"alpha_pattern": {"layers.1.self_attn.q_proj": 4}, "use_rslora": True},
            }.items():
                base = AutoModelForCausalLM.from_pretrained(root / "model")
                lora = LoraConfig(
                    r=4,
                    lora_alpha=16,
                    target_modules=TARGETS.get(architecture, ALL_PROJECTIONS),
                    init_lora_weights=False,
                    **pattern,
                )
                get_peft_model(base, lora).save_pretrained(root / name)
                adapters[name] = root / name
            made[architecture] = Tiny(architecture, root / "model", adapters)
        return made[architecture]

    return make


class Engine:
    """A scheduler on its own thread, without HTTP."""

    def __init__(self, runner: Runner, scheduler: Scheduler, limits: Limits) -> None:
        self.runner, self.scheduler, self.limits = runner, scheduler, limits

    def submit(self, ids: list[int], max_new_tokens: int, *, adapter: Adapter | None = None, **more: Any) -> Job:
        sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True} | more.pop("params", {})
        request = GenerateRequest(
            input_ids=ids, sampling_params=EngineSampling(**sampling), **({"return_logprob": True} | more)
        )
        job = make_job(request, adapter, self.limits)
        self.scheduler.post(lambda: self.scheduler.submit(job))
        return job

    async def done(self, job: Job) -> Job:
        async with asyncio.timeout(120):
            async for _ in progress(job):
                pass
        return job

    async def generate(self, ids: list[int], max_new_tokens: int, **more: Any) -> Job:
        return await self.done(self.submit(ids, max_new_tokens, **more))


StartEngine = Callable[..., AbstractAsyncContextManager[Engine]]


@pytest.fixture
def start_engine() -> StartEngine:
    """`async with start_engine(folder, max_running=…) as engine`."""

    @asynccontextmanager
    async def start(folder: Path, **settings: Any) -> AsyncIterator[Engine]:
        chosen = EngineSettings(**{"threads": 1, "prefill_chunk": 32, "cache_tokens": 4096} | settings)
        runner = load_runner(folder, ModelSettings(path=str(folder)), chosen)
        scheduler = Scheduler(
            runner, max_running=chosen.max_running, prefill_chunk=chosen.prefill_chunk, cache_tokens=chosen.cache_tokens
        )
        # A crash of the thread cancels the test, as it ends the process.
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(scheduler.run, asyncio.get_running_loop()))
            try:
                yield Engine(runner, scheduler, Limits(runner.vocab_size, runner.context_length, frozenset({2}), None))
            finally:
                scheduler.stop()

    return start

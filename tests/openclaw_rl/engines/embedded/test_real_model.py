"""The bundled SmolLM2-135M-Instruct: what it states, and exact log-probs in every way of serving it (a few minutes on a
CPU).
"""

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer

from openclaw_rl.engines.embedded.llama_runner import LlamaRunner
from openclaw_rl.engines.embedded.process import context_length, end_ids
from openclaw_rl.models.identity import hash_tensors
from openclaw_rl.models.resolve import ResolvedModel, base_hash, load_model, resolve
from openclaw_rl.settings import ModelSettings

pytestmark = pytest.mark.real_model

ALONE, SHARED = 2.0, 4.0
"""Bounds, in units of the rounding of a plain fp32 forward on this machine (`rounding`)."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QUESTIONS = [
    "Give me three tips to sleep better.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is 7 times 8?",
]


@pytest.fixture(scope="module")
def resolved(bundled_cache: Path) -> ResolvedModel:
    return resolve(ModelSettings(), bundled_cache)


@pytest.fixture(scope="module")
def base(resolved: ResolvedModel) -> torch.nn.Module:
    return load_model(resolved)


@pytest.fixture(scope="module")
def prompts(resolved: ResolvedModel) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(resolved.folder, local_files_only=True)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


@pytest.fixture(scope="module")
def adapter(resolved: ResolvedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter on all seven projections; `test_the_adapter_matters` says how much it does."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, init_lora_weights=False)
    model = get_peft_model(load_model(resolved), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 0.9
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapted(resolved: ResolvedModel, adapter: Path) -> torch.nn.Module:
    return PeftModel.from_pretrained(load_model(resolved), adapter).eval()


@pytest.fixture
def log_probs(base: Any, adapted: Any) -> Callable[[list[int], float, bool], torch.Tensor]:
    def plain(ids: list[int], temperature: float, with_adapter: bool) -> torch.Tensor:
        model = adapted if with_adapter else base
        with torch.inference_mode():
            return (model(input_ids=torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)

    return plain


@pytest.fixture(scope="module")
def rounding(base: Any, adapted: Any, prompts: list[list[int]]) -> dict[bool, float]:
    """The largest difference between plain forwards in fp32 and in float64 at temperature 1, with an adapter or not."""

    def table(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([prompts[0]])).logits[0].log_softmax(-1)

    return {
        with_adapter: float((table(model) - table(copy.deepcopy(model).double())).abs().max())
        for with_adapter, model in ((False, base), (True, adapted))
    }


def test_what_the_model_states(resolved):
    tokenizer = AutoTokenizer.from_pretrained(resolved.folder, local_files_only=True)
    assert resolved.name == "SmolLM2-135M-Instruct"
    assert end_ids(resolved.folder) == {tokenizer.convert_tokens_to_ids("<|im_end|>")} == {2}
    assert context_length(resolved.folder, ModelSettings()) == 8192
    assert base_hash(resolved) == hash_tensors(resolved.folder)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(rendered, add_special_tokens=False).input_ids.count(2) == 2  # system and user


async def test_log_probs_are_those_of_a_plain_forward(resolved, prompts, adapter, log_probs, rounding, start_engine):
    """Greedy and at 0.7, base and adapter: alone, as second turns from the cache, then all in one batch."""
    worst = {"alone": 0.0, "batched": 0.0, "cached": 0.0}

    def difference(job: Any, with_adapter: bool) -> float:
        temperature = job.sampling.temperature or 1.0
        table = log_probs(job.prompt + job.output, temperature, with_adapter)
        expected = table[len(job.prompt) - 1 : -1].gather(-1, torch.tensor(job.output)[:, None])[:, 0]
        return (torch.tensor(job.log_probs) - expected).abs().max().item() * temperature / rounding[with_adapter]

    async with start_engine(resolved.folder, prefill_chunk=512, cache_tokens=16384) as engine:
        assert isinstance(engine.runner, LlamaRunner)
        loaded = engine.runner.load_adapter("a", adapter)
        cases = [(with_adapter, t) for with_adapter in (False, True) for t in (0.0, 0.7)]
        for (with_adapter, t), ids in zip(cases, prompts, strict=True):
            job = await engine.generate(ids, 24, adapter=loaded if with_adapter else None, params={"temperature": t})
            worst["alone"] = max(worst["alone"], difference(job, with_adapter))
            turn = job.prompt + job.output + prompts[0]
            job = await engine.generate(turn, 12, adapter=loaded if with_adapter else None, params={"temperature": t})
            assert job.cached_tokens == len(ids) + 23
            worst["cached"] = max(worst["cached"], difference(job, with_adapter))
        jobs = []
        for index, ids in enumerate(prompts * 2):
            with_adapter, t = cases[index % 4]
            more = {"adapter": loaded if with_adapter else None, "extra_key": "batch", "params": {"temperature": t}}
            jobs.append((engine.submit(ids[: len(ids) - index % 3], 12, **more), with_adapter))
        await asyncio.gather(*(engine.done(job) for job, _ in jobs))
        worst["batched"] = max(difference(job, with_adapter) for job, with_adapter in jobs)
    assert worst["alone"] <= ALONE, worst
    assert worst["batched"] <= SHARED, worst
    assert worst["cached"] <= SHARED, worst


def test_the_adapter_matters(prompts, log_probs):
    """Its effect exceeds 1 nat a token, so that a missing or wrong adapter cannot pass for a right one."""
    without, under = (log_probs(prompts[0], 1.0, with_adapter) for with_adapter in (False, True))
    picked = torch.tensor(prompts[0][1:])[:, None]
    assert (without[:-1].gather(-1, picked) - under[:-1].gather(-1, picked)).abs().mean() > 1.0


async def test_scoring_is_a_plain_forward(resolved, prompts, log_probs, rounding, start_engine):
    ids = prompts[0] + prompts[1]
    table = log_probs(ids, 1.0, False)
    expected = table[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    async with start_engine(resolved.folder, prefill_chunk=32) as engine:
        job = await engine.generate(ids, 0, logprob_start_len=0)
    assert job.prompt_log_probs[1:] == pytest.approx(expected, abs=SHARED * rounding[False])

"""Recorded log-probs are as exact as one plain fp32 forward of the same tensors over the recorded ids.

Greedy and at temperature 0.7; with and without an adapter whose effect exceeds 1 nat. Random weights under large
adapters magnify rounding, and kernels differ between machines. So the bound is measured where the test runs: the
largest difference, over the whole table of log-probs, between plain forwards in fp32 and in float64. The engine's
errors, measured alone and batched over all architectures on one CPU, were at most 0.9 of it.
"""

import asyncio
import random

import pytest
import torch

from openclaw_rl.engines.embedded.llama_runner import LlamaRunner
from openclaw_rl.engines.embedded.transformers_runner import TransformersRunner

ALONE, SHARED = 2.0, 4.0
"""Bounds of `Tiny.off` for a reply alone, and for one that shared its steps or its prefix."""
FAST = ["llama", "llama3_rope", "mistral", "qwen2", "qwen3"]
SLOW = ["gpt_neox", "gemma2"]
TEMPERATURES = [0.0, 0.7]


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 320), k=length)


def worst(tiny, adapter, job) -> float:
    """The largest error of the reply's log-probs, in units of a plain forward's rounding."""
    assert len(job.log_probs) == len(job.output)
    return tiny.off(adapter, job.prompt + job.output, job.log_probs, job.sampling.temperature or 1.0)


@pytest.mark.parametrize("architecture", FAST + SLOW)
async def test_each_architecture_gets_its_runner(architecture, make_tiny, start_engine):
    async with start_engine(make_tiny(architecture).folder) as engine:
        assert isinstance(engine.runner, LlamaRunner if architecture in FAST else TransformersRunner)


@pytest.mark.parametrize("architecture", FAST + SLOW)
async def test_alone(architecture, make_tiny, start_engine):
    tiny = make_tiny(architecture)
    async with start_engine(tiny.folder) as engine:
        for adapter in (None, "one", "two"):
            loaded = engine.runner.load_adapter(adapter, tiny.adapters[adapter]) if adapter else None
            for temperature in TEMPERATURES:
                params = {"temperature": temperature, "sampling_seed": 1}
                job = await engine.generate(
                    prompt(70, 1), 24, adapter=loaded, params=params, extra_key=f"T{temperature}"
                )
                assert job.cached_tokens == 0
                assert worst(tiny, adapter, job) <= ALONE


@pytest.mark.parametrize("architecture", FAST + SLOW)
async def test_greedy_takes_the_most_likely_token(architecture, make_tiny, start_engine):
    tiny = make_tiny(architecture)
    async with start_engine(tiny.folder) as engine:
        job = await engine.generate(prompt(40, 2), 16, params={"temperature": 0.0})
    ids = job.prompt + job.output
    table = tiny.log_probs(None, ids)[len(job.prompt) - 1 : -1]
    taken = table.gather(-1, torch.tensor(job.output)[:, None])[:, 0]
    assert (table.amax(-1) - taken).max().item() <= SHARED * tiny.rounding(None, ids)  # but for ties within rounding


@pytest.mark.parametrize("architecture", FAST + SLOW)
async def test_batched_with_adapters_side_by_side(architecture, make_tiny, start_engine):
    tiny = make_tiny(architecture)
    async with start_engine(tiny.folder, max_running=12) as engine:
        loaded = {name: engine.runner.load_adapter(name, folder) for name, folder in tiny.adapters.items()}
        jobs = []
        for index in range(12):
            adapter = (None, "one", "two")[index % 3]
            params = {"temperature": TEMPERATURES[index % 2], "sampling_seed": index}
            job = engine.submit(prompt(5 + 13 * index, index), 20, adapter=loaded.get(adapter), params=params)
            jobs.append((adapter, job))
        await asyncio.gather(*(engine.done(job) for _, job in jobs))
        assert max(worst(tiny, adapter, job) for adapter, job in jobs) <= SHARED


@pytest.mark.parametrize("architecture", [*FAST, "gpt_neox"])
async def test_from_the_prefix_cache(architecture, make_tiny, start_engine):
    """Turns that extend each other, one that branches off inside, and one that repeats a prompt exactly."""
    tiny = make_tiny(architecture)
    async with start_engine(tiny.folder) as engine:
        loaded = engine.runner.load_adapter("one", tiny.adapters["one"])
        for adapter in (None, loaded):
            name = "one" if adapter else None
            params = {"temperature": 0.7, "sampling_seed": 1}
            first = await engine.generate(prompt(60, 3), 20, adapter=adapter, params=params)
            turn = first.prompt + first.output + prompt(30, 4)
            second = await engine.generate(turn, 20, adapter=adapter, params=params)
            branch = await engine.generate(turn[:50] + prompt(20, 5), 20, adapter=adapter, params=params)
            again = await engine.generate(turn, 20, adapter=adapter, params={"temperature": 0.0})
            assert first.cached_tokens == 0
            assert second.cached_tokens == 79  # the last sampled token has no KV yet
            assert branch.cached_tokens == 50
            assert again.cached_tokens >= 50
            assert max(worst(tiny, name, job) for job in (first, second, branch, again)) <= SHARED


@pytest.mark.parametrize("architecture", FAST + SLOW)
async def test_prompt_scoring(architecture, make_tiny, start_engine):
    """Every start, chunk borders inside, a cached prefix, and the top-k and given ids beside it."""
    tiny = make_tiny(architecture)
    ids = prompt(100, 6)
    table, near = tiny.log_probs(None, ids), SHARED * tiny.rounding(None, ids)
    async with start_engine(tiny.folder, prefill_chunk=32) as engine:
        for start in (0, 1, 31, 32, 33, 70, 98, 99):
            more = {"top_logprobs_num": 5, "token_ids_logprob": [7, 3]}
            job = await engine.generate(ids, 0, logprob_start_len=start, **more)
            expected = table[start:-1].gather(-1, torch.tensor(ids[start + 1 :])[:, None])[:, 0].tolist()
            assert job.prompt_log_probs[0] is None
            assert job.prompt_log_probs[1:] == pytest.approx(expected, abs=near)
            assert len(job.prompt_top_log_probs) == len(ids) - start
            assert job.prompt_id_log_probs[0] is None
            for row, given in zip(table[start:-1], job.prompt_id_log_probs[1:], strict=True):
                assert given == pytest.approx(row[[7, 3]].tolist(), abs=near)
            for at, top in enumerate(job.prompt_top_log_probs[1:]):
                values, _ = table[start + at].topk(5)
                assert [value for value, _ in top] == pytest.approx(values.tolist(), abs=near)
                assert [table[start + at, index].item() for _, index in top] == pytest.approx(values.tolist(), abs=near)


async def test_the_adapters_matter(make_tiny):
    """The bars above would hold for an adapter that is ignored, were its effect below them."""
    for architecture in FAST + SLOW:
        tiny = make_tiny(architecture)
        ids = prompt(50, 7)
        base, one, two = (tiny.log_probs(name, ids) for name in (None, "one", "two"))
        assert (base - one).abs().mean() > 1.0
        assert (one - two).abs().mean() > 0.1

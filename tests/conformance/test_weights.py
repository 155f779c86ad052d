"""Replacing the engine's own weights under running replies, by the product's own swap."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from openclaw_rl.engines.http import HttpEngine
from openclaw_rl.engines.serving import ServingVersions
from openclaw_rl.errors import EngineError
from openclaw_rl.full_weights import FullWeightSwap
from openclaw_rl.proxy.generation import EngineExtras, Generation, Sampled
from openclaw_rl.settings import EngineSettings
from openclaw_rl.types import SamplingParams

TOKENS, CHATS = 120, 6
TOKENS_ON_A_GPU = 1500
"""So that replies still run when the swaps come."""


@dataclass(slots=True)
class World:
    engine: HttpEngine
    serving: ServingVersions
    swapper: FullWeightSwap
    folders: tuple[Path, Path]
    version: int = 0

    async def swap(self) -> None:
        """Odd versions are the other weights, even ones the model's own."""
        self.version += 1
        await self.swapper.swap(self.version, self.folders[self.version % 2])

    async def chat(self, prompt: tuple[int, ...], tokens: int) -> Sampled:
        running = Generation(
            self.engine,
            self.serving,
            rid=f"swap-{prompt[-1]}",
            prompt_ids=prompt,
            sampling=SamplingParams(max_new_tokens=tokens, temperature=0.7),
            end_ids=(),
            extras=EngineExtras(ignore_eos=True),
        )
        async with running, aclosing(running.events()) as events:
            async for _ in events:
                pass
        return running.sampled


@pytest.fixture
async def world(served, http) -> AsyncIterator[World]:
    if served.weights is None:
        pytest.skip("--other-weights names no folder: the swap of the engine's own weights was not tested")
    engine, serving = HttpEngine(served.url, settings=EngineSettings()), ServingVersions(30)
    serving.switch(0, None)
    world = World(engine, serving, FullWeightSwap(engine, serving, drain_s=0, call_timeout_s=60), served.weights)
    yield world
    if world.version % 2:  # leave the engine as it was
        await world.swap()
    await engine.aclose()


async def test_no_reply_is_lost_and_each_token_has_the_log_prob_of_the_weights_that_sampled_it(world, served):
    prompts = [(*tuple(range(3, 40 + n)), n + 50) for n in range(CHATS)]
    tokens = TOKENS if served.is_ours else TOKENS_ON_A_GPU
    tasks = [asyncio.create_task(world.chat(prompt, tokens)) for prompt in prompts]
    for _ in range(3):
        await asyncio.sleep(0.05)
        await world.swap()
    replies = await asyncio.gather(*tasks)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in served.weights]
    straddling, wrong = 0, []
    for prompt, reply in zip(prompts, replies, strict=True):
        assert (len(reply.ids), reply.finish, reply.is_aligned) == (tokens, "length", True)
        straddling += len(reply.runs) > 1
        ids = torch.tensor([[*prompt, *reply.ids]])
        with torch.no_grad():
            by_weights = [torch.log_softmax(model(ids).logits[0].float() / 0.7, -1) for model in models]
        at = len(prompt)
        for version, length in reply.runs:
            for place in range(at, at + length):
                expected, other = (
                    float(by_weights[n][place - 1, ids[0, place]]) for n in (version % 2, 1 - version % 2)
                )
                got = reply.log_probs[place - len(prompt)]
                if abs(got - expected) > (1e-4 if served.is_ours else 0.3):
                    wrong.append((len(prompt), version, place - at, length, got, expected, other))
            at += length
    assert straddling, "no reply was cut: the test shows nothing"
    # (reply, version, place in its run, length of the run, log-prob, of these weights, of the other ones)
    assert not wrong, f"{len(wrong)} of {CHATS * tokens}: {wrong[:20]}"


async def test_a_folder_that_holds_no_weights_leaves_the_old_ones(world, tmp_path):
    before = await world.engine.score((5, 6, 7), (8, 9), lora_path=None, extra_key="before")
    with pytest.raises(EngineError):
        await world.swapper.swap(99, tmp_path)
    assert world.serving.current == world.version
    after = await world.engine.score((5, 6, 7), (8, 9), lora_path=None, extra_key="after")
    assert after.log_probs == pytest.approx(before.log_probs, abs=0.05)

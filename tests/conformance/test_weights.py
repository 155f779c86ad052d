"""Replacing the engine's own weights under running replies, by the product's own swap."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.dialect import EngineSampling, GenerateRequest
from openclaw_rl.errors import EngineError
from openclaw_rl.proxy.generation import Decoding, EngineExtras, Generation, Sampled
from openclaw_rl.publishing.full_swap import FullWeightSwap
from openclaw_rl.settings import EngineSettings
from openclaw_rl.types import SamplingParams

TOKENS, CHATS, SWAPS = 120, 6, 3
BF16_NEAR = 0.3
"""Bound of a token's error on an engine that computes in bfloat16."""


class Wrong(NamedTuple):
    """A token whose log-prob is not that of the weights its run names."""

    runs: list[list[int]]
    version: int
    place: int
    """In its run; 0 follows a seam."""
    token: int
    got: float
    own: float
    """Under the model's own weights (even versions)."""
    other: float


@dataclass(slots=True)
class World:
    engine: HttpEngine
    serving: VersionAdmission
    swapper: FullWeightSwap
    folders: tuple[Path, Path]
    version: int = 0
    running: list[Generation] = field(default_factory=list)
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    async def swap(self) -> None:
        """Odd versions are the other weights, even ones the model's own."""
        self.version += 1
        await self.swapper.swap(self.version, self.folders[self.version % 2])

    async def chat(self, prompt: tuple[int, ...]) -> Sampled:
        running = Generation(
            self.engine,
            self.serving,
            rid=f"swap-{prompt[-1]}",
            prompt_ids=prompt,
            decoding=Decoding(
                SamplingParams(max_new_tokens=TOKENS, temperature=0.7), (), EngineExtras(ignore_eos=True)
            ),
        )
        self.running.append(running)
        async with running, aclosing(running.events()) as events:
            async for _ in events:
                self.grew.set()
        return running.sampled

    async def each_has(self, tokens: int) -> None:
        """Every reply has so many tokens of the version that serves."""

        def short() -> bool:
            runs = [reply.sampled.runs[-1:] for reply in self.running]
            return len(runs) < CHATS or any(run == [] or run[0] < [self.version, tokens] for run in runs)

        while short():
            self.grew.clear()
            await self.grew.wait()


class Forward:
    """Plain fp32 passes under both weights."""

    def __init__(self, folders: tuple[Path, Path]) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
        self._models = [model.to(self._device) for model in models]

    def log_probs(self, ids: list[int], start: int, *, temperature: float) -> tuple[list[float], ...]:
        """Of ids[start:]."""
        both = []
        for model in self._models:
            with torch.no_grad():
                logits = model(torch.tensor([ids], device=self._device)).logits[0, start - 1 : -1].cpu() / temperature
            both.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist())
        return tuple(both)

    def near(self, ids: list[int], *, temperature: float) -> float:
        """Four times the rounding of these passes: their largest difference from passes in float64."""
        worst = 0.0
        for model in self._models:
            given = torch.tensor([ids], device=self._device)
            tables = []
            for dtype in (torch.float32, torch.float64):
                with torch.no_grad():
                    tables.append((model.to(dtype)(given).logits[0] / temperature).log_softmax(-1).double())
            model.float()
            worst = max(worst, (tables[0] - tables[1]).abs().max().item())
        return 4 * worst


@pytest.fixture
async def world(served, http) -> AsyncIterator[World]:
    if served.weights is None:
        pytest.skip("--other-weights names no folder: the swap of the engine's own weights was not tested")
    engine, serving = HttpEngine(served.url, settings=EngineSettings()), VersionAdmission(30)
    serving.switch(0, None)
    swapper = FullWeightSwap(engine, serving, drain_s=0, call_timeout_s=30, push_timeout_s=60)
    world = World(engine, serving, swapper, served.weights)
    yield world
    if world.version % 2:  # leave the engine as it was
        await world.swap()
    await engine.aclose()


@pytest.mark.parametrize("before_the_cut", [1, 15])
async def test_no_reply_is_lost_and_each_token_has_the_log_prob_of_the_weights_that_sampled_it(
    world, served, before_the_cut
):
    """Cut as early as after the first token of a run: what an engine repeats then looks like a whole reply."""
    prompts = [(*tuple(range(3, 40 + n)), n + 50) for n in range(CHATS)]
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(world.chat(prompt)) for prompt in prompts]
        for _ in range(SWAPS):
            await world.each_has(before_the_cut)
            await world.swap()
    replies = [task.result() for task in running]
    joined, wrong, off, forward = 0, [], 0.0, Forward(served.weights)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert (len(reply.ids), reply.finish, reply.is_aligned) == (TOKENS, "length", True), reply.runs
        joined += len(reply.runs) > 1
        by_weights = forward.log_probs([*prompt, *reply.ids], len(prompt), temperature=0.7)
        near = forward.near([*prompt, *reply.ids], temperature=0.7) if served.is_ours else BF16_NEAR
        at = 0
        for version, length in reply.runs:
            for place in range(length):
                got, under = reply.log_probs[at], [values[at] for values in by_weights]
                off = max(off, abs(got - under[version % 2]))
                if abs(got - under[version % 2]) > near:
                    wrong.append(Wrong(reply.runs, version, place, reply.ids[at], got, *under))
                at += 1
    assert joined, "no reply was cut: the test shows nothing"
    print(f"runs {[reply.runs for reply in replies]}, at most {off:.4f} nats off")  # noqa: T201
    assert not wrong, f"{len(wrong)} of {CHATS * TOKENS} tokens: {wrong[:12]}"


async def test_a_prompt_known_under_the_old_weights_is_computed_anew_under_the_new_ones(world, served):
    prompt, response = tuple(range(3, 150)), tuple(range(200, 220))

    async def cached_tokens(key: str) -> int:
        sampling = EngineSampling(max_new_tokens=1)
        request = GenerateRequest(input_ids=list(prompt), sampling_params=sampling, extra_key=key)
        return (await world.engine.generate(request)).meta_info.cached_tokens

    async def score(key: str) -> tuple[float, ...]:
        return (await world.engine.score(prompt, response, lora_path=None, extra_key=key)).log_probs

    scores = [await score("v0")]
    assert await cached_tokens("v0") > 100
    await world.swap()
    assert (await cached_tokens("v1"), await cached_tokens("v0")) == (0, 0)
    scores.append(await score("v1"))
    forward = Forward(served.weights)
    under = forward.log_probs([*prompt, *response], len(prompt), temperature=1.0)
    near = forward.near([*prompt, *response], temperature=1.0) if served.is_ours else BF16_NEAR
    for number, values in enumerate(scores):
        for got, right, other in zip(values, under[number], under[1 - number], strict=True):
            assert abs(got - right) < near, (number, got, right, other)


async def test_a_folder_that_holds_no_weights_leaves_the_old_ones(world, tmp_path):
    before = await world.engine.score((5, 6, 7), (8, 9), lora_path=None, extra_key="before")
    with pytest.raises(EngineError):
        await world.swapper.swap(99, tmp_path)
    assert world.serving.current == world.version
    after = await world.engine.score((5, 6, 7), (8, 9), lora_path=None, extra_key="after")
    assert after.log_probs == pytest.approx(before.log_probs, abs=0.05)

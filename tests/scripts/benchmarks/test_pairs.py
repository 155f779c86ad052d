"""The learning benchmark's plain forward gives the same pairs as the real embedded engine.

The engine scores through the product's own path: the bundled model's first layers, its front end's prompts, an adapter
that matters.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.learning.engine import ForwardEngine, ScoringEngine
from benchmarks.learning.fleet import Reply
from benchmarks.learning.served import ServedEngine, embedded_engine, worst_difference
from benchmarks.learning.simulation import Asked, Simulation
from benchmarks.learning.subject import Subject
from openclaw_opd.method import METHOD
from openclaw_opd.settings import OpdSettings
from openclaw_rl.engines.base import Score
from openclaw_rl.offline.personas import PREFERENCES, topics
from openclaw_rl.settings import ModelSettings, TrainerSettings
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Sample, SamplingParams

pytestmark = pytest.mark.real_model

TOLERANCE = 5e-4
"""In nats: two ways of computing the same in fp32."""
REPLIES = (
    "To boil an egg, fill a pot with enough cold water to cover it.",
    "You should:\n1. Take an egg.\n2. Boil it for eight minutes.",
    "Well, " * 12,
)


@pytest.fixture(scope="module")
def subject(short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(ModelSettings(path=str(short_model)), tmp_path_factory.mktemp("cache"), "cpu")


@pytest.fixture(scope="module")
def policy(subject: Subject) -> LoraPolicy:
    policy = subject.new_policy(TrainerSettings(rank=4))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.parameters.items():
        if ".lora_B." in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.fixture(scope="module")
def engine_url(short_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings, cache = ModelSettings(path=str(short_model)), tmp_path_factory.mktemp("cache")
    with embedded_engine(settings, cache, device="cpu", threads=1) as url:
        yield url


def pairs_of(subject: Subject, engine: ScoringEngine, teacher: str, **more: float) -> list[Sample]:
    """One round of three turns, the last one the second of its chat, whose replies the user does not like."""
    settings = OpdSettings.model_validate({"teacher": teacher} | more)
    user = Simulation(subject, PREFERENCES["short"], METHOD, settings, engine, seed=0, reads_request=False)
    asked = user.first(random.Random(0).sample(topics("train"), len(REPLIES)))
    asked[-1] = Asked(asked[-1].topic, (*asked[-1].messages, "Here is a long story.", "No, shorter please."))
    replies = [Reply(ids := subject.encode(text), (-1.0,) * len(ids)) for text in REPLIES]
    batch = asyncio.run(user.round(asked, replies, user.said(asked, replies), 1, SamplingParams(96, temperature=0.7)))
    assert len(batch.samples) == len(REPLIES), batch.dropped
    return batch.samples


@pytest.mark.parametrize("teacher", ["policy", "base"])
def test_both_give_the_same_pairs(subject: Subject, policy: LoraPolicy, engine_url: str, teacher: str) -> None:
    forward = pairs_of(subject, ForwardEngine(policy), teacher)
    served = pairs_of(subject, ServedEngine(policy, engine_url, name=teacher), teacher)
    assert worst_difference(forward, served) < TOLERANCE
    other = pairs_of(subject, ForwardEngine(policy), "base" if teacher == "policy" else "policy")
    assert worst_difference(forward, other) > 100 * TOLERANCE, "the adapter matters"


def test_both_give_the_same_guided_pairs(subject: Subject, policy: LoraPolicy, engine_url: str) -> None:
    forward = pairs_of(subject, ForwardEngine(policy), "base", guidance=1.0)
    served = pairs_of(subject, ServedEngine(policy, engine_url, name="guided"), "base", guidance=1.0)
    assert worst_difference(forward, served) < 3 * TOLERANCE  # two passes, one of them twice
    assert worst_difference(forward, pairs_of(subject, ForwardEngine(policy), "base")) > 100 * TOLERANCE
    tables = pairs_of(subject, ForwardEngine(policy), "base", guidance=1.0, top_k=8)
    assert all(sample.hint is not None and sample.hint.top_k is not None for sample in tables)
    assert worst_difference(forward, tables) < TOLERANCE


def test_both_give_the_same_log_probs_of_given_ids(subject: Subject, policy: LoraPolicy, engine_url: str) -> None:
    prompt, response = subject.prompt("How do I boil an egg?"), subject.encode(REPLIES[0])
    ids = [tuple(range(10 * t, 10 * t + 1 + t % 3)) for t in range(len(response))]

    async def of(engine: ScoringEngine) -> Score:
        async with engine.serves(1) as lora_path:
            return await engine.score_ids(prompt, response, ids, lora_path=lora_path, extra_key=None)

    engines = (ForwardEngine(policy), ServedEngine(policy, engine_url, name="ids"))
    forward, served = (asyncio.run(of(engine)) for engine in engines)
    assert forward.top_ids == served.top_ids == tuple(ids)
    assert forward.log_probs == pytest.approx(served.log_probs, abs=TOLERANCE)
    for own, theirs in zip(forward.top_log_probs or (), served.top_log_probs or (), strict=True):
        assert own == pytest.approx(theirs, abs=TOLERANCE)

"""Samples for the random Llama of `make_model`, and a learner on both."""

import random
from collections.abc import Callable
from typing import Protocol

import pytest
import torch
from transformers import LlamaForCausalLM

from openclaw_rl.methods.binary_rl import METHOD
from openclaw_rl.settings import MethodSettings, TrainerSettings
from openclaw_rl.trainers.learner import LoraLearner
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Ids, Sample, VersionRun

VOCABULARY = 64


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


class MakeSample(Protocol):
    def __call__(
        self,
        sample_id: str,
        *,
        prompt: Ids | int = ...,
        response: Ids | int = ...,
        reward: float = ...,
        temperature: float = ...,
        mask: tuple[bool, ...] | None = ...,
        rollout: tuple[float, ...] | None = ...,
    ) -> Sample: ...


@pytest.fixture
def make_sample() -> MakeSample:
    def make(
        sample_id: str,
        *,
        prompt: Ids | int = 5,
        response: Ids | int = 4,
        reward: float = 1.0,
        temperature: float = 0.7,
        mask: tuple[bool, ...] | None = None,
        rollout: tuple[float, ...] | None = None,
    ) -> Sample:
        dice = random.Random(sample_id)
        prompt_ids = tuple(dice.randrange(VOCABULARY) for _ in range(prompt)) if isinstance(prompt, int) else prompt
        ids = tuple(dice.randrange(VOCABULARY) for _ in range(response)) if isinstance(response, int) else response
        return Sample(
            sample_id=sample_id,
            prompt_ids=prompt_ids,
            response_ids=ids,
            loss_mask=mask or (True,) * len(ids),
            rollout_log_probs=rollout or tuple(-3.0 - 2 * dice.random() for _ in ids),
            versions=(VersionRun(0, len(ids)),),
            temperature=temperature,
            reward=reward,
        )

    return make


@pytest.fixture
def batch(make_sample: MakeSample) -> list[Sample]:
    """Four samples of different lengths, temperatures and signs, one with a hole in its mask."""
    return [
        make_sample("a", prompt=3, response=4, reward=1.0),
        make_sample("b", prompt=7, response=2, reward=-1.0, temperature=1.0),
        make_sample("c", prompt=2, response=6, reward=1.0, mask=(True, False, True, True, False, True)),
        make_sample("d", prompt=5, response=1, reward=-1.0, temperature=0.3),
    ]


@pytest.fixture
def settings() -> TrainerSettings:
    return TrainerSettings(rank=2, alpha=8, learning_rate=1e-2, micro_batch_tokens=64, max_tokens=64)


@pytest.fixture
def make_learner(make_model: Callable[..., LlamaForCausalLM], settings: TrainerSettings) -> Callable[..., LoraLearner]:
    def make(
        trainer: TrainerSettings = settings, method: MethodSettings | None = None, base_hash: str = "base"
    ) -> LoraLearner:
        policy = LoraPolicy(make_model(), trainer)
        learner = LoraLearner(policy, METHOD, trainer, method or MethodSettings(), base_hash=base_hash)
        learner.load(None, fresh_moments=False)
        return learner

    return make

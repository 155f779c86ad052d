"""A random Llama of a few thousand parameters, samples for it, and a learner on both."""

import random
from collections.abc import Callable
from typing import Protocol

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

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
def make_model() -> Callable[..., LlamaForCausalLM]:
    def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.4,
        )
        model = LlamaForCausalLM(config).to(dtype).eval()
        if dtype is torch.float64:
            _true_float64(model)
        return model

    return make


def _true_float64(model: LlamaForCausalLM) -> None:
    """transformers' RMSNorm rounds to fp32 inside; torch's does not: float64 gradients can be compared to 1e-9."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            norm = torch.nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            model.set_submodule(name, norm)


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

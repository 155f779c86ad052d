"""A random Llama with an adapter, in float64."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.lora import LoraPolicy


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def settings() -> TrainerSettings:
    return TrainerSettings(rank=2, alpha=8, learning_rate=3e-2, micro_batch_tokens=64, max_tokens=64)


@pytest.fixture
def policy(make_model: Callable[..., LlamaForCausalLM], settings: TrainerSettings) -> LoraPolicy:
    made = LoraPolicy(make_model(dtype=torch.float64), settings)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return made

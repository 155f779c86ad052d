"""Samples for the random Llama of `make_model`, and a learner on both."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
import torch
from trainer_bench import Bench, FakeApi
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.learner import LocalLearner
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
def make_learner(make_model: Callable[..., LlamaForCausalLM], settings: TrainerSettings) -> Callable[..., LocalLearner]:
    def make(
        trainer: TrainerSettings = settings, method: BinarySettings | None = None, base_hash: str = "base"
    ) -> LocalLearner:
        policy = LoraPolicy(make_model(), trainer)
        learner = LocalLearner(policy, METHOD, trainer, method or BinarySettings(), base_hash=base_hash)
        learner.load(None, fresh_moments=False)
        return learner

    return make


COMMON = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "qwen3": {"head_dim": 8},
    "qwen2": {},  # Qwen2.5
    "llama": {"rope_theta": 1e4},
    "smollm": {"model_type": "llama", "tie_word_embeddings": True},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.5},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"head_dim": 8, "sliding_window": 4},
}


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> Callable[[], PreTrainedModel]:
    """A random model of a few thousand parameters, of each architecture; equal ones every time."""
    special = dict(ARCHITECTURES[request.param])
    config = AutoConfig.for_model(str(special.pop("model_type", request.param)), **COMMON, **special)

    def make() -> PreTrainedModel:
        torch.manual_seed(0)
        # transformers' own choice, `sdpa`, drops a soft cap
        attention = {} if "attn_logit_softcapping" not in special else {"attn_implementation": "eager"}
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), **attention).eval()
        return model

    return make


@pytest.fixture
def bench(tmp_path: Path, batch: list[Sample]) -> Bench:
    return Bench(tmp_path, FakeApi(batch))

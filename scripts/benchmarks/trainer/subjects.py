"""Random models of common shapes, and batches of random ids for them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from openclaw_rl.types import Sample, VersionRun


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151936
    tied: bool = True

    @property
    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=262144,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=self.tied,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        )


SHAPES = {
    "tiny": Shape("tiny", 64, 128, 2, 4, kv_heads=2, head_dim=16, vocabulary=1024),
    "0.6b": Shape("0.6b", 1024, 3072, 28, 16),
    "1.7b": Shape("1.7b", 2048, 6144, 28, 16),
    "4b": Shape("4b", 2560, 9728, 36, 32),
    "8b": Shape("8b", 4096, 12288, 36, 32, tied=False),
}


def random_model(shape: Shape, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with equal weights every time, and logits that spread over about a nat."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = Qwen3ForCausalLM._from_config(shape.config, dtype=dtype)
    return model.eval()


def batch_of(lengths: Sequence[int], vocabulary: int) -> list[Sample]:
    """Return samples of these lengths in tokens; half of each is the reply."""
    return [_sample(number, length, vocabulary) for number, length in enumerate(lengths)]


def mixed_lengths(n: int, shortest: int, longest: int, seed: int = 0) -> list[int]:
    """Return lengths that are even in their logarithm, in random order, like turns of agents."""
    dice = random.Random(seed)
    ratio = longest / shortest
    lengths = [round(shortest * ratio ** (place / max(1, n - 1))) for place in range(n)]
    dice.shuffle(lengths)
    return lengths


def _sample(number: int, length: int, vocabulary: int) -> Sample:
    dice = random.Random(number)
    ids = tuple(dice.choices(range(vocabulary), k=length))
    t = length // 2
    return Sample(
        sample_id=f"s{number}",
        prompt_ids=ids[: length - t],
        response_ids=ids[length - t :],
        loss_mask=(True,) * t,
        rollout_log_probs=(-11.0,) * t,
        versions=(VersionRun(0, t),),
        temperature=0.7,
        reward=1.0 if number % 2 else -1.0,
    )

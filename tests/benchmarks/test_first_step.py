"""What the first-step benchmark says of a step, to first order, is what the product's own step does."""

import copy

import pytest
import torch
from learning.subject import forced_log_probs
from learning_first_step import credit_of, first_order, gradients
from transformers import LlamaConfig, LlamaForCausalLM

from openclaw_rl.methods.binary_rl import METHOD
from openclaw_rl.settings import MethodSettings, TrainerSettings
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.trainers.optimizer import PolicyOptimizer
from openclaw_rl.trainers.step import train_step
from openclaw_rl.types import Ids, Sample, VersionRun

TEMPERATURE, RATE = 0.7, 2e-5


class Small:
    """A subject of two random layers."""

    device = "cpu"

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
        self._base = LlamaForCausalLM(
            LlamaConfig(vocab_size=32, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.4, **sizes)
        ).eval()

    def new_policy(self, settings: TrainerSettings) -> LoraPolicy:
        policy = LoraPolicy(copy.deepcopy(self._base), settings)
        policy.reset(settings.seed)
        return policy


def samples_of(subject: Small, replies: list[tuple[Ids, float]]) -> list[Sample]:
    policy = subject.new_policy(TrainerSettings())
    log_probs = forced_log_probs(policy, [((5, 6, 7), ids) for ids, _ in replies], TEMPERATURE)
    return [
        Sample(
            sample_id=str(k),
            prompt_ids=(5, 6, 7),
            response_ids=ids,
            loss_mask=(True,) * len(ids),
            rollout_log_probs=tuple(values),
            versions=(VersionRun(0, len(ids)),),
            temperature=TEMPERATURE,
            reward=reward,
        )
        for k, ((ids, reward), values) in enumerate(zip(replies, log_probs, strict=True))
    ]


def mean_log_prob(policy: LoraPolicy, samples: list[Sample]) -> float:
    values = forced_log_probs(policy, [(s.prompt_ids, s.response_ids) for s in samples], TEMPERATURE)
    return sum(sum(row) / len(row) for row in values) / len(values)


@pytest.mark.parametrize("baseline", ["none", "others"])
def test_the_gain_is_that_of_a_real_step(baseline: str) -> None:
    subject = Small()
    batch = samples_of(subject, [((8, 9, 3), 1.0), ((10, 11, 12, 13, 14), -1.0), ((20, 3), -1.0)])
    wished = samples_of(subject, [((9, 9, 3), 1.0), ((8, 3), 1.0)])
    credit = credit_of(batch, baseline)
    rows = [gradients(subject, some) for some in (batch, wished, batch)]  # type: ignore[arg-type]
    gain, kl = first_order(torch.tensor([credit]) / len(batch), *rows, [3, 5, 2], RATE)
    settings = TrainerSettings(learning_rate=RATE)
    policy = subject.new_policy(settings)
    before = mean_log_prob(policy, wished)
    method = MethodSettings(baseline=baseline)  # type: ignore[arg-type]
    given = METHOD.advantages(batch, method, {})
    train_step(policy, PolicyOptimizer(policy.parameters, settings), METHOD, batch, given, settings, method)
    assert float(gain) == pytest.approx(mean_log_prob(policy, wished) - before, rel=0.05)
    assert 0 < float(kl) < 1e-3


def test_credit_of_what_was_thanked_for() -> None:
    batch = samples_of(Small(), [((8, 3), 1.0), ((9, 3), -1.0), ((10, 3), -1.0)])
    assert credit_of(batch, "thanked") == [1.0, 0.0, 0.0]
    assert credit_of(batch, "none") == [1.0, -1.0, -1.0]
    assert credit_of(batch, "others") == pytest.approx([2.0, -1.0, -1.0])

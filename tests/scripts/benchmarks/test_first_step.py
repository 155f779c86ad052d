"""The first-step benchmark predicts, to first order, the step of the product."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.learning.subject import forced_log_probs
from benchmarks.learning_first_step import Chat, adam, credit_of, first_order, gradients
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.settings import TrainerSettings
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


@pytest.mark.parametrize("name", ["none", "others"])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_gain_is_that_of_real_steps(name: str, steps: int) -> None:
    subject = Small()
    replies: list[tuple[Ids, float]] = [((8, 9, 3), 1.0), ((10, 11, 12, 13, 14), -1.0), ((20, 3), -1.0), ((9, 3), 1.0)]
    samples = samples_of(subject, replies)
    batches = [samples[:3], samples[1:], [samples[0], samples[2]]][:steps]
    wished = samples_of(subject, [((9, 9, 3), 1.0), ((8, 3), 1.0)])
    settings, method = TrainerSettings(learning_rate=RATE), BinarySettings(baseline=name)  # type: ignore[arg-type]
    policy = subject.new_policy(settings)
    optimizer, before = PolicyOptimizer(policy.parameters, settings), mean_log_prob(policy, wished)
    credit = torch.zeros(1, steps, len(samples))
    for k, batch in enumerate(batches):
        given = METHOD.advantages(batch, method, {})
        for one, row in zip(batch, given, strict=True):
            credit[0, k, int(one.sample_id)] = row[0] / len(batch)
        train_step(policy, optimizer, METHOD, batch, given, settings, method)
    rows = [gradients(subject, some) for some in (samples, wished, samples)]  # type: ignore[arg-type]
    gain, kl = first_order(credit, *rows, [len(ids) for ids, _ in replies], settings)
    assert float(gain) == pytest.approx(mean_log_prob(policy, wished) - before, rel=0.05)
    assert 0 < float(kl) < 1e-2


def test_what_gets_credit() -> None:
    thanked, complained, other, demonstrated = samples_of(
        Small(), [((8, 3), 1.0), ((9, 3), -1.0), ((10, 3), -1.0), ((8, 3), 1.0)]
    )
    batch = [Chat(complained, thanked, demonstrated), Chat(other, other, None)]
    assert credit_of(batch, "none") == ([-1.0, -1.0], [1.0, -1.0], [0.0, 0.0])
    first, second, _ = credit_of(batch, "others")
    assert first == pytest.approx([-2 / 3, -2 / 3])
    assert second == pytest.approx([2.0, -2 / 3])
    assert credit_of(batch, "by turn") == ([0.0, 0.0], [2.0, -2.0], [0.0, 0.0])
    assert credit_of(batch, "praise only") == ([0.0, 0.0], [1.0, 0.0], [0.0, 0.0])
    assert credit_of(batch, "whatever was said") == ([1.0, 1.0], [1.0, 1.0], [0.0, 0.0])
    assert credit_of(batch, "demonstrations") == ([0.0, 0.0], [0.0, 0.0], [1.0, 0.0])


def test_without_any_credit_nothing_moves() -> None:
    assert not adam(torch.zeros(3, 1, 4), TrainerSettings()).any()

"""Whole steps of all three methods: a step moves the policy where the user wants it, and nowhere else."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from three_methods import (
    METHODS,
    MIXED,
    WEIGHTS,
    make_sample,
    plain_logits,
    step_gradients,
)
from torch import Tensor
from transformers import LlamaForCausalLM

from openclaw_combine.method import METHOD as COMBINE
from openclaw_opd.method import METHOD as OPD
from openclaw_rl.methods.base import Method
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.base import NoStep, Step
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.trainers.optimizer import PolicyOptimizer
from openclaw_rl.trainers.step import train_step
from openclaw_rl.types import DropReason, HintTerm, Sample


def own_log_probs(policy: LoraPolicy, sample: Sample) -> Tensor:
    """[T, V] at temperature 1."""
    with torch.no_grad():
        return torch.log_softmax(plain_logits(policy, sample), -1)


def of_reply(log_probs: Tensor, sample: Sample) -> tuple[float, ...]:
    return tuple(log_probs.gather(-1, torch.tensor(sample.response_ids)[:, None]).squeeze(-1).tolist())


def seen_by(policy: LoraPolicy, shift: float, student_term: str) -> Sample:
    """A reply as sampled by this policy, that the teacher finds likelier by `shift` nats than the student does."""
    sample = make_sample("seen", 4, 5, temperature=1.0)
    own = of_reply(own_log_probs(policy, sample), sample)
    return replace(
        sample,
        rollout_log_probs=own,
        teacher_log_probs=tuple(value + shift for value in own),
        student_log_probs=own if student_term == "engine" else None,
    )


def one_step(policy: LoraPolicy, method: Method, batch: Sequence[Sample], trainer: TrainerSettings) -> dict[str, float]:
    credit = method.advantages(batch, WEIGHTS, {})
    optimizer = PolicyOptimizer(policy.parameters, trainer)
    metrics, left_out = train_step(policy, optimizer, method, batch, credit, trainer, WEIGHTS)
    assert left_out == []
    assert all(math.isfinite(value) for value in metrics.values())
    return metrics


@pytest.mark.parametrize("student_term", ["engine", "trainer"])
@pytest.mark.parametrize("name", ["opd", "combine"])
@pytest.mark.parametrize("shift", [-0.5, 0.5])
def test_a_hint_alone_moves_the_reply_to_where_the_teacher_wants_it(
    name: str, student_term: str, shift: float, policy: LoraPolicy, settings: TrainerSettings
) -> None:
    """What the user corrected is never reinforced, and a hint without a reward is no zero (D1, D2, D3)."""
    sample = seen_by(policy, shift, student_term)
    before = sum(of_reply(own_log_probs(policy, sample), sample))
    metrics = one_step(policy, METHODS[name], [sample], settings)
    after = sum(of_reply(own_log_probs(policy, sample), sample))
    assert (after - before) * shift > 0
    assert metrics["gap"] == pytest.approx(shift)
    assert metrics["gap_abs"] == pytest.approx(abs(shift))
    assert metrics["gap_clip_share"] == 0


@pytest.mark.parametrize("student_term", ["engine", "trainer"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_teacher_that_agrees_moves_nothing_at_any_temperature(
    student_term: str, temperature: float, policy: LoraPolicy, settings: TrainerSettings
) -> None:
    """Both sides at temperature 1, the ratio at the reply's: no sharpening by construction (D23, D31)."""
    sample = replace(seen_by(policy, 0.0, student_term), temperature=temperature)
    for gradient in step_gradients(policy, OPD, [sample], settings):
        assert float(gradient.abs().max()) < 1e-12


def test_a_table_that_is_the_students_own_moves_nothing_and_another_pulls(
    policy: LoraPolicy, settings: TrainerSettings
) -> None:
    sample = replace(seen_by(policy, 0.0, "engine"), temperature=0.5)

    def with_table(log_probs: Tensor) -> Sample:
        top = log_probs.topk(8, -1)
        table = {"ids": top.indices.tolist(), "log_probs": top.values.tolist()}
        return replace(sample, hint=HintTerm.of({"top_k": table}))

    own = own_log_probs(policy, sample)
    for gradient in step_gradients(policy, OPD, [with_table(own)], settings):
        assert float(gradient.abs().max()) < 1e-12
    other = torch.log_softmax(own + torch.randn(own.shape, generator=torch.Generator().manual_seed(2)).double(), -1)
    sample, gentle = replace(sample, temperature=1.0), settings.model_copy(update={"learning_rate": 1e-3})
    first, second, third = (one_step(policy, OPD, [with_table(other)], gentle) for _ in range(3))
    assert first["top_k_kl"] > second["top_k_kl"] > third["top_k_kl"] > 0
    assert 0 < first["student_tail"] < 1


def test_a_demonstration_becomes_likelier_in_every_method(policy: LoraPolicy, settings: TrainerSettings) -> None:
    sample = make_sample("shown", 4, 5, demonstration=True)
    for method in METHODS.values():
        before = sum(of_reply(own_log_probs(policy, sample), sample))
        metrics = one_step(policy, method, [sample], settings)
        assert sum(of_reply(own_log_probs(policy, sample), sample)) > before
        assert metrics["demonstrations"] == 1
        assert "abs_log_ratio" not in metrics
        assert "advantage_mean" not in metrics


def test_every_mean_is_over_what_it_is_of(policy: LoraPolicy, settings: TrainerSettings) -> None:
    metrics = one_step(policy, COMBINE, MIXED, settings)
    assert (metrics["samples"], metrics["demonstrations"]) == (7, 1)
    assert metrics["trained_tokens"] == sum(sum(sample.loss_mask) for sample in MIXED)
    assert metrics["hint_share"] == pytest.approx(5 / 6)
    assert metrics["reward_share"] == pytest.approx(4 / 6)
    assert metrics["hint_and_reward_share"] == pytest.approx(3 / 6)
    assert metrics["abs_log_ratio"] < 5  # a demonstration's zeros would count
    assert 0 < metrics["gap_clip_share"] < 1
    assert abs(metrics["gap"]) <= metrics["gap_abs"]
    assert metrics["top_k_kl"] > 0
    assert metrics["advantage_max"] <= 0.7 + 1.3 * 1.5  # case TN-3: bounded
    assert metrics["advantage_min"] >= -0.7 - 1.3 * 1.5


@pytest.mark.parametrize(("name", "usable"), [("binary_rl", 5), ("opd", 6), ("combine", 7)])
def test_samples_of_another_method_are_dropped_not_trained_as_zeros(
    name: str, usable: int, make_model: Callable[..., LlamaForCausalLM], settings: TrainerSettings
) -> None:
    learner = LocalLearner(LoraPolicy(make_model(), settings), METHODS[name], settings, WEIGHTS, base_hash="b")
    learner.load(None, fresh_moments=False)
    step = learner.step(MIXED, lambda: None)
    assert isinstance(step, Step)
    assert step.metrics["samples"] == usable
    assert set(step.drop.values()) <= {DropReason.METHOD}
    assert len(step.drop) == 7 - usable
    if name == "opd":
        assert isinstance(learner.step([MIXED[1]], lambda: None), NoStep)

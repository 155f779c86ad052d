"""Whole steps of all three methods on a random Llama in float64: how a batch is cut changes nothing, every gradient
equals a slow reference's, and a step moves the policy where the user wants it.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from openclaw_combine.method import METHOD as COMBINE
from openclaw_opd.method import METHOD as OPD
from openclaw_opd.top_k import top_k_of
from openclaw_rl.methods.base import Method, TokenTerms
from openclaw_rl.methods.binary_rl import METHOD as BINARY
from openclaw_rl.settings import MethodSettings, TrainerSettings
from openclaw_rl.trainers.base import NoStep, Step
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.trainers.optimizer import PolicyOptimizer
from openclaw_rl.trainers.step import accumulate, train_step
from openclaw_rl.types import DropReason, Sample, VersionRun

VOCABULARY = 64
METHODS = {"binary_rl": BINARY, "opd": OPD, "combine": COMBINE}
WEIGHTS = MethodSettings(binary_weight=0.7, opd_weight=1.3, opd_clip=1.5, demonstration_weight=0.4)

by_method = pytest.mark.parametrize("name", METHODS)


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


def make_sample(
    sample_id: str,
    prompt: int,
    response: int,
    *,
    reward: float | None = None,
    hint: bool = False,
    student: bool = True,
    top_k: int = 0,
    mask: tuple[bool, ...] | None = None,
    demonstration: bool = False,
    temperature: float = 0.7,
) -> Sample:
    dice = random.Random(sample_id)

    def log_probs() -> tuple[float, ...]:
        return tuple(-2.0 - 3 * dice.random() for _ in range(response))

    extra = None
    if top_k:
        rows = [[math.log(dice.random() + 0.05) for _ in range(top_k + 1)] for _ in range(response)]
        table = [[value - math.log(math.fsum(map(math.exp, row))) for value in row[:top_k]] for row in rows]
        ids = [dice.sample(range(VOCABULARY), top_k) for _ in range(response)]
        extra = json.dumps({"top_k": {"ids": ids, "log_probs": table}})
    return Sample(
        sample_id=sample_id,
        prompt_ids=tuple(dice.randrange(VOCABULARY) for _ in range(prompt)),
        response_ids=tuple(dice.randrange(VOCABULARY) for _ in range(response)),
        loss_mask=mask or (True,) * response,
        rollout_log_probs=(0.0,) * response if demonstration else log_probs(),
        versions=(VersionRun(0, response),),
        temperature=1.0 if demonstration else temperature,
        reward=reward,
        teacher_log_probs=log_probs() if hint or top_k else None,
        student_log_probs=log_probs() if (hint or top_k) and student else None,
        extra_json=extra,
        is_demonstration=demonstration,
    )


HOLE = (True, False, True, True, False, True)
MIXED = (
    make_sample("both", 3, 4, reward=1.0, hint=True),
    make_sample("reward", 7, 2, reward=-1.0, temperature=1.0),
    make_sample("hint", 2, 6, hint=True, mask=HOLE),
    make_sample("trainer's student", 4, 3, reward=-1.0, hint=True, student=False),
    make_sample("top-k", 2, 5, top_k=4, mask=HOLE[:5]),
    make_sample("top-k and reward", 6, 2, reward=1.0, top_k=7, student=False, temperature=0.3),
    make_sample("demonstration", 5, 3, demonstration=True, mask=HOLE[:3]),
)


def batch_of(method: Method) -> list[Sample]:
    """Of the mixed batch what the method trains on."""
    return [sample for sample in MIXED if method.can_train(sample)]


def gradients(policy: LoraPolicy) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in policy.parameters.values() if parameter.grad is not None]
    assert len(found) == len(policy.parameters)
    for parameter in policy.parameters.values():
        parameter.grad = None
    return found


def step_gradients(
    policy: LoraPolicy,
    method: Method,
    batch: Sequence[Sample],
    trainer: TrainerSettings,
    settings: MethodSettings = WEIGHTS,
) -> list[Tensor]:
    accumulate(policy, method, batch, method.advantages(batch, settings, {}), trainer, settings)
    return gradients(policy)


def assert_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# -- cutting -----------------------------------------------------------------------------------------------------------


@by_method
def test_one_batch_cut_four_ways_gives_equal_gradients(
    name: str, policy: LoraPolicy, settings: TrainerSettings
) -> None:
    """Micro-batches of one, of a few and of all samples, and all of them packed into one row."""
    method = METHODS[name]
    batch = batch_of(method)
    cuts = [settings.model_copy(update={"micro_batch_tokens": budget}) for budget in (1, 20, 1000)]
    one, *others = [step_gradients(policy, method, batch, trainer) for trainer in cuts]
    assert max(float(gradient.abs().max()) for gradient in one) > 1e-3
    for other in (*others, packed_gradients(policy, method, batch, settings)):
        assert_equal(one, other)


def packed_gradients(
    policy: LoraPolicy, method: Method, batch: Sequence[Sample], trainer: TrainerSettings
) -> list[Tensor]:
    """All samples in one row behind a block-diagonal mask, with nothing of the trainer but the loss."""
    lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in batch]
    owner = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)])
    allowed = (owner[:, None] == owner[None, :]) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    logits = policy.model(
        input_ids=torch.tensor([[i for sample in batch for i in sample.prompt_ids + sample.response_ids]]),
        position_ids=torch.tensor([[k for length in lengths for k in range(length)]]),
        attention_mask=torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)[None, None],
    ).logits[0]
    total, offset = torch.zeros((), dtype=torch.float64), 0
    for sample, credit, length in zip(batch, method.advantages(batch, WEIGHTS, {}), lengths, strict=True):
        own = logits[offset + len(sample.prompt_ids) - 1 : offset + length - 1]
        ids = torch.tensor(sample.response_ids)[:, None]
        log_probs = torch.log_softmax(own / sample.temperature, -1).gather(-1, ids).squeeze(-1)
        at_one, others = torch.log_softmax(own, -1), method.gathered_ids(sample)
        terms = TokenTerms(
            log_probs=log_probs,
            old_log_probs=log_probs.detach(),
            rollout_log_probs=torch.tensor(sample.rollout_log_probs, dtype=torch.float64),
            ref_log_probs=None,
            advantages=torch.tensor(credit, dtype=torch.float64),
            loss_mask=torch.tensor(sample.loss_mask),
            unscaled_log_probs=at_one.gather(-1, ids).squeeze(-1).detach(),
            gathered_log_probs=None if others is None else at_one.gather(-1, torch.tensor(others)),
        )
        total = total + method.loss(sample, terms, trainer, WEIGHTS).loss_sum / sum(sample.loss_mask) / len(batch)
        offset += length
    total.backward()
    return gradients(policy)


@by_method
def test_permuting_samples_changes_nothing(name: str, policy: LoraPolicy, settings: TrainerSettings) -> None:
    batch = batch_of(METHODS[name])
    moved = [batch[k] for k in random.Random(3).sample(range(len(batch)), len(batch))]
    assert_equal(*(step_gradients(policy, METHODS[name], samples, settings) for samples in (batch, moved)))


@by_method
def test_sharing_a_row_changes_nothing(name: str, policy: LoraPolicy, settings: TrainerSettings) -> None:
    method, batch = METHODS[name], batch_of(METHODS[name])
    first = batch[0]
    longer = [replace(sample, prompt_ids=first.prompt_ids + first.response_ids + (8,)) for sample in batch[1:]]
    samples = [first, *longer]
    shared = step_gradients(policy, method, samples, settings)
    credit = method.advantages(samples, WEIGHTS, {})
    accumulate(policy, method, samples, credit, settings, WEIGHTS, share_prefixes=False)
    assert_equal(shared, gradients(policy))


# -- the slow reference ------------------------------------------------------------------------------------------------


@by_method
@pytest.mark.parametrize("old", ["recompute", "rollout"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_gradients_equal_the_slow_reference(
    name: str, old: Any, kl_coef: float, policy: LoraPolicy, settings: TrainerSettings
) -> None:
    method, trainer = METHODS[name], settings.model_copy(update={"old_log_probs": old, "kl_coef": kl_coef})
    batch = batch_of(method)
    ours = step_gradients(policy, method, batch, trainer)
    binary, opd = {"binary_rl": (1.0, 0.0), "opd": (0.0, 1.0), "combine": (0.7, 1.3)}[name]
    slow_loss(policy, batch, trainer, binary, opd).backward()
    assert_equal(ours, gradients(policy))


def slow_loss(
    policy: LoraPolicy, batch: Sequence[Sample], trainer: TrainerSettings, binary: float, opd: float
) -> Tensor:
    """DESIGN §4, one sample and one token at a time, every id of a table by its own."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in batch:
        logits = plain_logits(policy, sample)
        with policy.reference():
            base = torch.log_softmax(plain_logits(policy, sample) / sample.temperature, -1)
        scaled, at_one = torch.log_softmax(logits / sample.temperature, -1), torch.softmax(logits, -1)
        table, losses = top_k_of(sample), []
        for t, (token, is_trained) in enumerate(zip(sample.response_ids, sample.loss_mask, strict=True)):
            if not is_trained:
                continue
            if sample.is_demonstration:
                losses.append(-WEIGHTS.demonstration_weight * scaled[t, token])
                continue
            credit = binary * sample.reward if sample.reward is not None else 0.0
            if sample.teacher_log_probs is not None and table is None:
                student = sample.student_log_probs
                own = math.log(at_one[t, token].item()) if student is None else student[t]
                credit += opd * min(max(sample.teacher_log_probs[t] - own, -1.5), 1.5)
            current, rollout = scaled[t, token], sample.rollout_log_probs[t]
            ratio = torch.exp(current - (current.item() if trainer.old_log_probs == "recompute" else rollout))
            objective = torch.minimum(ratio * credit, ratio.clamp(0.8, 1.28) * credit)
            disagreement, is_kept = math.exp(current.item() - rollout), True
            if trainer.old_log_probs == "recompute":
                is_kept = 1 / 8 <= disagreement <= 8
                objective = objective * (min(disagreement, 2.0) if is_kept else 0.0)
            elif credit < 0:
                objective = torch.maximum(objective, torch.full_like(objective, 3 * credit))
            loss = -objective
            if table is not None and is_kept and opd:
                p = [at_one[t, i] for i in table.ids[t]]
                q = [math.exp(value) for value in table.log_probs[t]]
                p.append(1 - torch.stack(p).sum())
                q.append(1 - math.fsum(q))
                loss = loss + opd * torch.stack([a * torch.log(a / b) for a, b in zip(p, q, strict=True)]).sum()
            difference = base[t, token] - current
            loss = loss + trainer.kl_coef * (torch.exp(difference) - difference - 1).clamp(max=10.0)
            losses.append(loss)
        total = total + torch.stack(losses).mean() / len(batch)
    return total


def plain_logits(policy: LoraPolicy, sample: Sample) -> Tensor:
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits: Tensor = policy.model(input_ids=ids).logits[0][len(sample.prompt_ids) - 1 : -1]
    return logits


# -- one method in another ---------------------------------------------------------------------------------------------


def test_a_combined_step_with_one_weight_zero_is_the_other_methods(
    policy: LoraPolicy, settings: TrainerSettings
) -> None:
    rewarded = [sample for sample in MIXED if sample.reward is not None or sample.is_demonstration]
    alone = step_gradients(policy, BINARY, rewarded, settings)
    combined = WEIGHTS.model_copy(update={"binary_weight": 1.0, "opd_weight": 0.0})
    assert_equal(alone, step_gradients(policy, COMBINE, rewarded, settings, combined))
    hinted = [sample for sample in MIXED if sample.teacher_log_probs is not None or sample.is_demonstration]
    alone = step_gradients(policy, OPD, hinted, settings)
    combined = WEIGHTS.model_copy(update={"binary_weight": 0.0, "opd_weight": 1.0})
    assert_equal(alone, step_gradients(policy, COMBINE, hinted, settings, combined))


@by_method
def test_what_stands_in_masked_tokens_changes_nothing(name: str, policy: LoraPolicy, settings: TrainerSettings) -> None:
    method = METHODS[name]
    sample = next(s for s in batch_of(method) if not all(s.loss_mask))

    def junk(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return values and tuple(v if m else -77.0 for v, m in zip(values, sample.loss_mask, strict=True))

    changed = replace(
        sample,
        rollout_log_probs=junk(sample.rollout_log_probs) or (),
        teacher_log_probs=junk(sample.teacher_log_probs),
        student_log_probs=sample.student_log_probs,
    )
    assert_equal(*(step_gradients(policy, method, [one], settings) for one in (sample, changed)))


# -- where a step goes -------------------------------------------------------------------------------------------------


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
        return replace(sample, extra_json=json.dumps({"top_k": table}))

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


# -- what is reported --------------------------------------------------------------------------------------------------


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

"""Gradients of all three methods: how a batch is cut changes nothing, and each equals a slow reference's."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from three_methods import METHODS, MIXED, WEIGHTS, batch_of, gradients, plain_logits, step_gradients
from tolerances import rel
from torch import Tensor

from openclaw_combine.method import METHOD as COMBINE
from openclaw_opd.hindsight import top_k_of
from openclaw_opd.method import METHOD as OPD
from openclaw_rl.methods.base import Method, TokenTerms
from openclaw_rl.methods.binary_rl import METHOD as BINARY
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.trainers.step import accumulate
from openclaw_rl.types import Sample

by_method = pytest.mark.parametrize("name", METHODS)


def assert_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    largest = max(float(b.abs().max()) for b in other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=rel(torch.float64, 4096) * largest)


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
    """Compute the loss one sample and one token at a time, and each id of a table alone."""
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
            since = trainer.kl_coef * min(disagreement, 2.0)
            loss = loss + since * (torch.exp(difference) - difference - 1).clamp(max=10.0)
            losses.append(loss)
        total = total + torch.stack(losses).mean() / len(batch)
    return total


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

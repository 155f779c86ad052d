"""One optimizer step: the cut of the batch changes no gradient, and it equals a plain torch + PEFT + AdamW step."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from close import assert_close, largest
from peft import LoraConfig, get_peft_model
from tolerances import rel
from torch import Tensor
from transformers import LlamaForCausalLM

from openclaw_rl.losses import TokenLogProbs
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.batches import MicroBatch, micro_batches
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.trainers.optimizer import PolicyOptimizer
from openclaw_rl.trainers.step import NotFinite, accumulate, train_step
from openclaw_rl.types import Sample

MakeModel = Callable[..., LlamaForCausalLM]


@pytest.fixture
def make_policy(make_model: MakeModel, settings: TrainerSettings) -> Callable[..., LoraPolicy]:
    def make(dtype: torch.dtype = torch.float64) -> LoraPolicy:
        policy = LoraPolicy(make_model(dtype=dtype), settings)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
        return policy

    return make


def credit(samples: Sequence[Sample]) -> list[list[float]]:
    return METHOD.advantages(samples, BinarySettings(), {})


def gradients(policy: LoraPolicy) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in policy.parameters.values() if parameter.grad is not None]
    assert len(found) == len(policy.parameters)
    for parameter in policy.parameters.values():
        parameter.grad = None
    return found


# -- cutting -----------------------------------------------------------------------------------------------------------


def packed_gradients(policy: LoraPolicy, samples: Sequence[Sample], settings: TrainerSettings) -> list[Tensor]:
    """All samples in one row behind a block-diagonal mask; of the trainer only the loss is used."""
    from openclaw_rl.methods.base import TokenTerms

    ids = [token for sample in samples for token in sample.prompt_ids + sample.response_ids]
    positions = [k for sample in samples for k in range(len(sample.prompt_ids) + len(sample.response_ids))]
    owner = torch.tensor(
        [i for i, sample in enumerate(samples) for _ in range(len(sample.prompt_ids) + len(sample.response_ids))]
    )
    allowed = (owner[:, None] == owner[None, :]) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    mask = torch.zeros(len(ids), len(ids), dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    logits = policy.model(
        input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), attention_mask=mask[None, None]
    ).logits[0]
    total, offset = torch.zeros((), dtype=torch.float64), 0
    for sample, advantages in zip(samples, credit(samples), strict=True):
        p, t = len(sample.prompt_ids), len(sample.response_ids)
        scaled = logits[offset + p - 1 : offset + p + t - 1] / sample.temperature
        log_probs = torch.log_softmax(scaled, -1).gather(-1, torch.tensor(sample.response_ids)[:, None]).squeeze(-1)
        terms = TokenTerms(
            log_probs=log_probs,
            old_log_probs=log_probs.detach(),
            rollout_log_probs=torch.tensor(sample.rollout_log_probs, dtype=torch.float64),
            ref_log_probs=None,
            advantages=torch.tensor(advantages, dtype=torch.float64),
            loss_mask=torch.tensor(sample.loss_mask),
        )
        total = total + METHOD.loss(sample, terms, settings, BinarySettings()).loss_sum / sum(sample.loss_mask) / len(
            samples
        )
        offset += p + t
    total.backward()
    return gradients(policy)


def test_one_batch_cut_four_ways_gives_equal_gradients(
    make_policy: Callable[..., LoraPolicy], settings: TrainerSettings, batch: list[Sample]
) -> None:
    """Case TN-5: micro-batches of one, two and four samples, and packed into one row."""
    policy = make_policy()

    def cut(budget: int) -> tuple[list[Tensor], float]:
        done = accumulate(
            policy,
            METHOD,
            batch,
            credit(batch),
            settings.model_copy(update={"micro_batch_tokens": budget}),
            BinarySettings(),
        )
        return gradients(policy), done.loss

    one, loss = cut(1)
    for other, other_loss in (cut(16), cut(1000), (packed_gradients(policy, batch, settings), loss)):
        assert other_loss == pytest.approx(loss, abs=rel(torch.float64, 2**14) * len(batch))
        for a, b in zip(one, other, strict=True):
            assert_close(a, b, ulps=2**14, scale=largest(one))
    assert max(float(gradient.abs().max()) for gradient in one) > 1e-3


def test_sharing_a_row_changes_no_gradient(
    make_policy: Callable[..., LoraPolicy], settings: TrainerSettings, make_sample: Callable[..., Sample]
) -> None:
    first = make_sample("1", prompt=4, response=3, reward=-1.0)
    second = make_sample("2", prompt=(*first.prompt_ids, *first.response_ids, 8), response=3)
    third = make_sample("3", prompt=(*second.prompt_ids, *second.response_ids, 8, 9), response=2, temperature=1.0)
    samples, policy = [first, third, second], make_policy()
    shared_work = accumulate(policy, METHOD, samples, credit(samples), settings, BinarySettings())
    shared = gradients(policy)
    policy.cut = lambda rows, token_budget: micro_batches(rows, 1)  # type: ignore[method-assign]
    alone_work = accumulate(policy, METHOD, samples, credit(samples), settings, BinarySettings(), share_prefixes=False)
    for a, b in zip(shared, gradients(policy), strict=True):
        assert_close(a, b, ulps=2**14, scale=largest(shared))
    assert shared_work.loss == pytest.approx(alone_work.loss, abs=rel(torch.float64, 2**14) * len(samples))
    assert shared_work.computed_tokens < 0.6 * alone_work.computed_tokens


def test_permuting_samples_changes_nothing(
    make_policy: Callable[..., LoraPolicy], settings: TrainerSettings, batch: list[Sample]
) -> None:
    policy, moved = make_policy(), [batch[i] for i in (2, 0, 3, 1)]
    accumulate(policy, METHOD, batch, credit(batch), settings, BinarySettings())
    one = gradients(policy)
    accumulate(policy, METHOD, moved, credit(moved), settings, BinarySettings())
    for a, b in zip(one, gradients(policy), strict=True):
        assert_close(a, b, ulps=2**14, scale=largest(one))


def test_zero_advantage_moves_nothing(
    make_policy: Callable[..., LoraPolicy], settings: TrainerSettings, batch: list[Sample]
) -> None:
    policy = make_policy()
    before = [parameter.detach().clone() for parameter in policy.parameters.values()]
    zeros = [[0.0] * len(sample.response_ids) for sample in batch]
    metrics, _ = train_step(
        policy, PolicyOptimizer(policy.parameters, settings), METHOD, batch, zeros, settings, BinarySettings()
    )
    assert metrics["grad_norm"] == 0
    for a, b in zip(before, policy.parameters.values(), strict=True):
        assert torch.equal(a, b)


def test_a_policy_that_is_still_the_base_is_its_own_reference(
    make_model: MakeModel, settings: TrainerSettings, batch: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings.model_copy(update={"kl_coef": 0.5})
    policy = LoraPolicy(make_model(dtype=torch.float64), settings)
    policy.reset(3)
    assert policy.is_base
    accumulate(policy, METHOD, batch, credit(batch), settings, BinarySettings())
    skipped = gradients(policy)
    with monkeypatch.context() as patch:
        patch.setattr(LoraPolicy, "is_base", False)
        accumulate(policy, METHOD, batch, credit(batch), settings, BinarySettings())
    for a, b in zip(skipped, gradients(policy), strict=True):
        assert_close(a, b, ulps=2**14, scale=largest(skipped))
    with torch.no_grad():
        next(p for name, p in policy.parameters.items() if ".lora_B." in name)[0, 0] = 1e-6
    assert not policy.is_base


# -- the plain reference -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_three_steps_equal_a_plain_reference(
    make_policy: Callable[..., LoraPolicy],
    make_model: MakeModel,
    settings: TrainerSettings,
    batch: list[Sample],
    kl_coef: float,
    old: str,
) -> None:
    settings = settings.model_copy(
        update={"kl_coef": kl_coef, "old_log_probs": old, "weight_decay": 0.1, "warmup_steps": 1, "max_grad_norm": 0.5}
    )
    policy = make_policy()
    start = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    optimizer = PolicyOptimizer(policy.parameters, settings)
    for _ in range(3):
        train_step(policy, optimizer, METHOD, batch, credit(batch), settings, BinarySettings())

    reference = get_peft_model(
        make_model(dtype=torch.float64), LoraConfig(r=2, lora_alpha=8, target_modules=list(settings.target_modules))
    ).eval()
    parameters = {name: p for name, p in reference.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(start[name])
    adamw = torch.optim.AdamW(list(parameters.values()), lr=1.0, betas=(0.9, 0.98), weight_decay=0.1)
    for rate in (0.5e-2, 1e-2, 1e-2):
        adamw.param_groups[0]["lr"] = rate
        adamw.zero_grad()
        plain_loss(reference, batch, kl_coef, old).backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 0.5)
        adamw.step()
    for name, parameter in policy.parameters.items():
        assert_close(parameter, parameters[name], ulps=2**24)  # Adam divides by small gradients
        assert not torch.equal(parameter, start[name])


def plain_loss(model: torch.nn.Module, batch: Sequence[Sample], kl_coef: float, old: str) -> Tensor:
    """Compute the clipped objective with its KL term, one sample and one token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in batch:
        current = plain_log_probs(model, sample)
        with torch.no_grad(), model.disable_adapter():
            reference = plain_log_probs(model, sample)
        tokens = []
        for k, trained in enumerate(sample.loss_mask):
            if not trained:
                continue
            rollout, reward = sample.rollout_log_probs[k], sample.reward
            assert reward is not None
            before = current[k].item() if old == "recompute" else rollout
            ratio = torch.exp(current[k] - before)
            objective = torch.minimum(ratio * reward, ratio.clamp(0.8, 1.28) * reward)
            weight = math.exp(current[k].item() - rollout)
            if old == "recompute":
                objective = objective * (min(weight, 2.0) if 1 / 8 <= weight <= 8 else 0.0)
            elif reward < 0:
                objective = torch.maximum(objective, torch.full_like(objective, 3 * reward))
            difference = reference[k] - current[k]
            k3 = torch.exp(difference) - difference - 1
            tokens.append(-objective + kl_coef * min(weight, 2.0) * k3.clamp(max=10.0))
        total = total + torch.stack(tokens).mean() / len(batch)
    return total


def plain_log_probs(model: torch.nn.Module, sample: Sample) -> Tensor:
    logits = model(input_ids=torch.tensor([sample.prompt_ids + sample.response_ids])).logits[0]
    log_probs = torch.log_softmax(logits / sample.temperature, -1)[len(sample.prompt_ids) - 1 : -1]
    return log_probs.gather(-1, torch.tensor(sample.response_ids)[:, None]).squeeze(-1)


# -- numbers that are not finite ---------------------------------------------------------------------------------------


@contextmanager
def broken(policy: LoraPolicy, indices: set[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if these samples' activations overflowed: their log-probs, and their whole graph, are nan."""
    token_log_probs = policy.token_log_probs

    def with_nan(batch: MicroBatch, **wanted: Any) -> dict[int, TokenLogProbs]:
        return {
            index: replace(values, log_probs=values.log_probs * torch.nan) if index in indices else values
            for index, values in token_log_probs(batch, **wanted).items()
        }

    with monkeypatch.context() as patch:
        patch.setattr(policy, "token_log_probs", with_nan)
        yield


@pytest.mark.parametrize("budget", [1, 1000])
def test_a_sample_without_numbers_is_left_out_as_if_it_never_came(
    make_policy: Callable[..., LoraPolicy],
    settings: TrainerSettings,
    batch: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
) -> None:
    settings = settings.model_copy(update={"micro_batch_tokens": budget})
    policy, clean = make_policy(), make_policy()
    with broken(policy, {1}, monkeypatch):
        optimizer = PolicyOptimizer(policy.parameters, settings)
        metrics, left_out = train_step(policy, optimizer, METHOD, batch, credit(batch), settings, BinarySettings())
    assert left_out == [1]
    assert metrics["samples"] == 3
    assert all(math.isfinite(value) for value in metrics.values())
    others = [batch[0], *batch[2:]]
    expected, _ = train_step(
        clean, PolicyOptimizer(clean.parameters, settings), METHOD, others, credit(others), settings, BinarySettings()
    )
    assert metrics["loss"] == pytest.approx(expected["loss"])
    for a, b in zip(policy.parameters.values(), clean.parameters.values(), strict=True):
        assert_close(a, b, ulps=2**24)  # Adam divides by small gradients


def test_a_batch_without_numbers_is_no_step(
    make_policy: Callable[..., LoraPolicy],
    settings: TrainerSettings,
    batch: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = make_policy()
    before = [parameter.detach().clone() for parameter in policy.parameters.values()]
    with broken(policy, {0, 1, 2, 3}, monkeypatch), pytest.raises(NotFinite):
        train_step(
            policy,
            PolicyOptimizer(policy.parameters, settings),
            METHOD,
            batch,
            credit(batch),
            settings,
            BinarySettings(),
        )
    for a, b in zip(before, policy.parameters.values(), strict=True):
        assert torch.equal(a, b)


def test_a_sampled_token_at_log_prob_minus_90_is_survived(
    make_policy: Callable[..., LoraPolicy], settings: TrainerSettings, make_sample: Callable[..., Sample]
) -> None:
    """Case TN-2, in fp32: the token is masked, the step is finite."""
    policy = make_policy(torch.float32)
    samples = [make_sample("x", response=3, rollout=(-90.0, -3.0, -0.0)), make_sample("y")]
    for old in ("recompute", "rollout"):
        changed = settings.model_copy(update={"old_log_probs": old})
        optimizer = PolicyOptimizer(policy.parameters, changed)
        metrics, left_out = train_step(policy, optimizer, METHOD, samples, credit(samples), changed, BinarySettings())
        assert left_out == []
        assert all(math.isfinite(value) for value in metrics.values())
        assert policy.is_finite()


@pytest.mark.parametrize("baseline", ["none", "ema"])
def test_a_batch_of_equal_rewards_moves_the_policy(
    make_policy: Callable[..., LoraPolicy],
    settings: TrainerSettings,
    make_sample: Callable[..., Sample],
    baseline: str,
) -> None:
    """Case TN-3: four single answers, all +1. They are not divided by their spread, and do not cancel out."""
    policy, method = make_policy(), BinarySettings(baseline=baseline)
    samples = [make_sample(name, reward=1.0) for name in "abcd"]
    given = METHOD.advantages(samples, method, {})
    assert 0 < max(map(abs, (value for row in given for value in row))) <= 10
    metrics, _ = train_step(
        policy, PolicyOptimizer(policy.parameters, settings), METHOD, samples, given, settings, method
    )
    assert math.isfinite(metrics["loss"])
    assert metrics["grad_norm"] > 0

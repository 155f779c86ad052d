"""Passes that recompute their activations, and a policy that runs out of memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from openclaw_rl.processes import malloc
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.base import NoStep, Step
from openclaw_rl.trainers.batches import rows_of
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.trainers.policy import DeviceMemory
from openclaw_rl.types import DropReason, Sample


def test_a_card_keeps_what_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free, total, allocated, reserved = 8_000, 24_000, 1_000, 3_000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    capped: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: capped.append(share))
    gpu = torch.device("cuda", 0)
    card = DeviceMemory(gpu, 10, None)
    assert card.holds_activations_of(800)  # 8,000 of the 10,000 that are free or the allocator's own
    assert not card.holds_activations_of(801)
    quarter = DeviceMemory(gpu, 10, 0.25)
    assert capped == [0.25]
    assert quarter.holds_activations_of(400)  # of 6,000 it has 1,000 already
    assert not quarter.holds_activations_of(401)
    assert not DeviceMemory(gpu, None, None).holds_activations_of(1)
    assert DeviceMemory(torch.device("cpu"), None, None).holds_activations_of(10**9)
    assert card.assume_less()
    assert not card.holds_activations_of(1)
    assert not card.assume_less()


@pytest.mark.parametrize(
    ("recompute", "expected"), [("auto", [True, False]), ("always", [True] * 2), ("never", [False] * 2)]
)
def test_the_settings_say_what_is_recomputed(
    make_model: Callable[..., LlamaForCausalLM],
    make_sample: Callable[..., Sample],
    recompute: Any,
    expected: list[bool],
) -> None:
    policy = LoraPolicy(make_model(), TrainerSettings(rank=2, alpha=8, recompute=recompute))
    samples = [make_sample("long", prompt=100, response=20), make_sample("short")]
    assert [policy.recomputes(passed, 64) for passed in policy.cut(rows_of(samples), 64)] == expected


def test_a_cpu_keeps_the_activations_of_as_many_layers_as_the_budget_or_free_memory_holds(
    make_model: Callable[..., LlamaForCausalLM], make_sample: Callable[..., Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0
    monkeypatch.setattr(malloc, "free_memory", lambda: free)
    cpu = DeviceMemory(torch.device("cpu"), 100, None, least_bytes=10)
    # 1,000 tokens have 200,000 bytes of fp32; 2,000 with a share of s have 2,000 * (20 + 180 s).
    assert cpu.kept_share(2_000, 1_000) == pytest.approx(80 / 180)
    assert cpu.kept_share(20_000, 1_000) == 0.0
    free = 1_500_000
    assert cpu.kept_share(2_000, 1_000) == pytest.approx(130 / 180)
    free = 10_000_000
    assert cpu.kept_share(2_000, 1_000) == 1.0
    assert DeviceMemory(torch.device("cuda", 0), 100, None).kept_share(2_000, 1_000) == 0.0
    assert DeviceMemory(torch.device("cpu"), None, None).kept_share(2_000, 1_000) == 0.0

    # A pass of a real model: its first layers are computed again, and the gradients stay the same.
    policy = LoraPolicy(make_model(), TrainerSettings(rank=2, alpha=8, micro_batch_tokens=64))
    calls, found = 0, []

    def between() -> None:
        nonlocal calls
        calls += 1

    policy.between = between
    (long,) = policy.cut(rows_of([make_sample("long", prompt=100, response=20)]), 64)
    layers = policy.model.config.num_hidden_layers
    for share, again in ((1.0, 0), (0.5, math.ceil(layers / 2)), (0.0, layers)):
        monkeypatch.setattr(policy._memory, "kept_share", lambda tokens, budget, share=share: share)
        calls = 0
        policy.log_probs(long, recompute=True)[0].sum().backward()  # type: ignore[no-untyped-call]
        assert calls == 2 * layers + again
        found.append([parameter.grad for parameter in policy.parameters.values()])
        for parameter in policy.parameters.values():
            parameter.grad = None
    assert all(torch.equal(kept, other) for others in found[1:] for kept, other in zip(found[0], others, strict=True))


def test_memory_that_runs_out_costs_activations_first_and_a_sample_then(
    make_learner: Callable[..., LocalLearner], batch: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner()
    policy = learner._policy
    token_log_probs, room = policy.token_log_probs, [False, False, True]

    def short_of_memory(*args: Any, recompute: bool = False, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not room.pop(0):
            raise torch.OutOfMemoryError("out of memory")
        return token_log_probs(*args, recompute=recompute, **kwargs)

    monkeypatch.setattr(policy, "token_log_probs", short_of_memory)
    first = learner.step(batch, lambda: None)
    assert isinstance(first, NoStep)
    assert first.drop == {}
    assert all(policy.recomputes(passed, 64) for passed in policy.cut(rows_of(batch), 64))
    learner.load(None, fresh_moments=False)
    second = learner.step(batch, lambda: None)
    assert isinstance(second, NoStep)
    assert second.drop == {"b": DropReason.TOO_LONG}  # the longest
    learner.load(None, fresh_moments=False)
    assert isinstance(learner.step(batch, lambda: None), Step)

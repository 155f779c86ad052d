"""A pass can be ended or paused before each layer, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.batches import micro_batches, rows_of
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Sample


@pytest.mark.parametrize("recompute", [False, True])
def test_every_layer_asks_on_the_way_forward_and_back(
    make_model: Callable[..., LlamaForCausalLM], settings: TrainerSettings, batch: list[Sample], recompute: bool
) -> None:
    calls = 0

    def between() -> None:
        nonlocal calls
        calls += 1

    model = make_model()
    layers = model.config.num_hidden_layers
    policy = LoraPolicy(model, settings, between=between)
    calls = 0  # the head's check has passed the layers once
    (whole,) = micro_batches(rows_of(batch), 1000)
    total = torch.stack([values.sum() for values in policy.log_probs(whole, recompute=recompute).values()]).sum()
    assert calls == layers
    total.backward()  # type: ignore[no-untyped-call]
    assert calls == layers * (3 if recompute else 2)


def test_a_raise_ends_the_way_back(
    make_model: Callable[..., LlamaForCausalLM], settings: TrainerSettings, batch: list[Sample]
) -> None:
    policy = LoraPolicy(make_model(), settings)
    (whole,) = micro_batches(rows_of(batch), 1000)
    total = torch.stack([values.sum() for values in policy.log_probs(whole).values()]).sum()

    def between() -> None:
        raise InterruptedError

    policy.between = between
    with pytest.raises(InterruptedError):
        total.backward()  # type: ignore[no-untyped-call]

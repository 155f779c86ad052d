"""The benchmark of the trainer's step compares equal work and measures exactness."""

from dataclasses import replace

import pytest
import torch
from tolerances import rel

from benchmarks.trainer.plain import PlainTrainer, in_order, longest_first
from benchmarks.trainer.sections import METHOD_SETTINGS, OurTrainer, exactness
from benchmarks.trainer.subjects import SHAPES, batch_of, mixed_lengths, random_model
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.lora import LoraPolicy

SETTINGS = TrainerSettings(rank=4, alpha=8, packing="on", micro_batch_tokens=128, max_tokens=256, learning_rate=1e-3)


def test_the_plain_step_and_ours_do_the_same() -> None:
    """Both give equal losses and equal adapters after the step."""
    shape, lengths = SHAPES["tiny"], mixed_lengths(5, 8, 40)
    samples = batch_of(lengths, shape.vocabulary)
    settings = SETTINGS.model_copy(update={"tis_mask": 1e30, "tis_clip": 1.0})
    # So far from the engine's numbers that every importance weight is at its ceiling of one.
    samples = [replace(sample, rollout_log_probs=(-60.0,) * len(sample.response_ids)) for sample in samples]
    plain = PlainTrainer(random_model(shape, "cpu", torch.float32), settings)
    policy = LoraPolicy(random_model(shape, "cpu", torch.float32), settings)
    policy.reset(0)
    theirs = dict(plain.model.named_parameters())
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            theirs[name].copy_(parameter)
    loss = plain.step(samples, in_order(lengths, 128))
    metrics = OurTrainer(policy, settings).step(samples)
    assert metrics["loss"] == pytest.approx(loss, rel=rel(ulps=256), abs=rel(ulps=256))
    for name, parameter in policy.parameters.items():
        # Adam moves a weight by the learning rate, whatever its gradient: a tenth of that tells steps apart.
        atol = settings.learning_rate / 10
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-3, atol=atol)
    assert METHOD_SETTINGS.baseline == "none"


def test_padded_batches_hold_every_sample_once_within_the_budget() -> None:
    lengths = mixed_lengths(12, 8, 100)
    for order in (in_order, longest_first):
        parts = order(lengths, 128)
        assert sorted(k for part in parts for k in part) == list(range(12))
        assert all(max(lengths[k] for k in part) * len(part) <= 128 or len(part) == 1 for part in parts)


def test_a_neighbour_changes_nothing() -> None:
    row = exactness(SHAPES["tiny"], SETTINGS, [20, 30, 9])
    assert row["neighbours_largest_change"] == 0
    assert isinstance(row["packed_mean_abs"], float)
    assert row["packed_mean_abs"] < rel(ulps=256)

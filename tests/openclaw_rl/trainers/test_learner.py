"""The learner: resuming is exact, samples it cannot use are named, probes are true."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from close import approx

from openclaw_rl.errors import TrainerError
from openclaw_rl.methods.binary_rl import BinarySettings
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.base import NoStep, Step
from openclaw_rl.trainers.checkpoint import OPTIMIZER_FILE
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.types import PRACTICE_SOURCES, DropReason, HintTerm, Sample, VersionRun

MakeLearner = Callable[..., LocalLearner]


def nothing() -> None:
    pass


def step(learner: LocalLearner, samples: list[Sample]) -> Step:
    result = learner.step(samples, nothing)
    assert isinstance(result, Step)
    return result


def weights(learner: LocalLearner) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner._policy.parameters.items()}


def same(a: LocalLearner, b: LocalLearner) -> bool:
    ours, theirs = weights(a), weights(b)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def batches(make_sample: Callable[..., Sample]) -> list[list[Sample]]:
    return [
        [
            make_sample(f"{n}-{i}", prompt=3 + i, response=2 + (n + i) % 4, reward=1.0 if (n + i) % 2 else -1.0)
            for i in range(3)
        ]
        for n in range(5)
    ]


@pytest.mark.parametrize("cut", [1, 3])
def test_steps_in_a_row_equal_steps_cut_by_a_restart(
    make_learner: MakeLearner, settings: TrainerSettings, batches: list[list[Sample]], tmp_path: Path, cut: int
) -> None:
    settings = settings.model_copy(update={"warmup_steps": 2})
    method = BinarySettings(baseline="ema", baseline_decay=0.6)
    straight, first = make_learner(settings, method), make_learner(settings, method)
    metrics = [step(straight, batch).metrics for batch in batches]
    for batch in batches[:cut]:
        step(first, batch)
    first.write(tmp_path)
    resumed = make_learner(settings, method)
    resumed.load(tmp_path, fresh_moments=False)
    again = [step(resumed, batch).metrics for batch in batches[cut:]]
    assert same(straight, resumed)  # bit for bit
    timeless = [{k: v for k, v in values.items() if not k.endswith("_s")} for values in metrics[cut:]]
    assert [{k: v for k, v in values.items() if not k.endswith("_s")} for values in again] == timeless


def test_loading_goes_back_as_well_as_forward(
    make_learner: MakeLearner, batches: list[list[Sample]], tmp_path: Path
) -> None:
    """A rollback: the same learner loads an older version, and the base, and steps from there as a new one would."""
    learner, twin = make_learner(), make_learner()
    step(learner, batches[0])
    learner.write(tmp_path)
    step(learner, batches[1])
    learner.load(tmp_path, fresh_moments=False)
    step(learner, batches[2])
    step(twin, batches[0])
    step(twin, batches[2])
    assert same(learner, twin)
    learner.load(None, fresh_moments=False)
    assert same(learner, make_learner())


@pytest.mark.parametrize("how", ["asked", "pruned"])
def test_moments_that_are_gone_start_fresh_with_a_warm_up(
    make_learner: MakeLearner, settings: TrainerSettings, batches: list[list[Sample]], tmp_path: Path, how: str
) -> None:
    settings = settings.model_copy(update={"warmup_steps": 3})
    learner = make_learner(settings)
    rates = [step(learner, batch).metrics["learning_rate"] for batch in batches]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    learner.write(tmp_path)
    if how == "pruned":
        (tmp_path / OPTIMIZER_FILE).unlink()
    fresh, kept = make_learner(settings), make_learner(settings)
    fresh.load(tmp_path, fresh_moments=how == "asked")
    assert same(fresh, learner)
    assert step(fresh, batches[0]).metrics["learning_rate"] == pytest.approx(0.0025)
    if how == "asked":
        kept.load(tmp_path, fresh_moments=False)
        assert step(kept, batches[0]).metrics["learning_rate"] == pytest.approx(0.01)
        assert not same(fresh, kept)


def test_a_step_moves_the_log_probs_where_the_reward_points(
    make_learner: MakeLearner, make_sample: Callable[..., Sample]
) -> None:
    praised, blamed = make_sample("praised", reward=1.0), make_sample("blamed", reward=-1.0)
    result = step(make_learner(), [praised, blamed])
    shifts = {}
    for probe in result.probes:
        shifts[tuple(probe.response_ids)] = sum(probe.log_probs) - sum(probe.parent_log_probs)
    assert shifts[praised.response_ids] > 0.01
    assert shifts[blamed.response_ids] < -0.01


@pytest.mark.parametrize(("threads", "used"), [(3, 3), (None, os.cpu_count())])
def test_a_step_on_practice_alone_takes_the_idle_cores(
    make_learner: MakeLearner, settings: TrainerSettings, batch: list[Sample], threads: int | None, used: int
) -> None:
    """Chats come first: one sample of a user's turn, and the step keeps to the trainer's own threads."""
    learner = make_learner(settings.model_copy(update={"practice_threads": threads}))
    before, seen = torch.get_num_threads(), set()
    practised = [replace(sample, hint=HintTerm(source=source)) for source in PRACTICE_SOURCES for sample in batch]
    for samples, expected in ((practised, used), ([*practised, *batch], before)):
        seen.clear()
        learner.step(samples, lambda: seen.add(torch.get_num_threads()))
        assert seen == {expected}
        assert torch.get_num_threads() == before


def test_probes_are_forced_log_probs_at_temperature_one(
    make_learner: MakeLearner, make_model: Callable[..., torch.nn.Module], batch: list[Sample]
) -> None:
    learner = make_learner()
    result = step(learner, batch)
    assert len(result.probes) == 2
    for probe in result.probes:
        ids = torch.tensor([probe.prompt_ids + probe.response_ids])
        for model, ours in ((make_model(), probe.parent_log_probs), (learner._policy.model, probe.log_probs)):
            with torch.no_grad():
                log_probs = torch.log_softmax(model(input_ids=ids).logits[0], -1)[len(probe.prompt_ids) - 1 : -1]
            expected = log_probs.gather(-1, torch.tensor(probe.response_ids)[:, None]).squeeze(-1)
            assert ours == approx(expected.tolist())
    assert result.metrics["probe_shift"] > 0


def test_metrics_are_flat_finite_and_say_what_happened(make_learner: MakeLearner, batch: list[Sample]) -> None:
    metrics = step(make_learner(), batch).metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert (metrics["samples"], metrics["trained_tokens"], metrics["dropped"]) == (4, 11, 0)
    assert (metrics["advantage_min"], metrics["advantage_max"], metrics["reward_mean"]) == (-1, 1, 0)
    assert {"loss", "grad_norm", "abs_log_ratio", "masked_share", "clip_share", "neg_log_prob"} <= metrics.keys()


def test_the_gap_to_the_engine_is_measured_on_tokens_of_the_parent_version(
    make_learner: MakeLearner, batch: list[Sample]
) -> None:
    """Tokens of older versions differ by what was learned since, demonstrations have no log-probs at all."""
    metrics = step(make_learner(), batch).metrics
    assert "fresh_abs_log_ratio" not in metrics  # the parent is not known

    def gap(samples: list[Sample], parent: int) -> float | None:
        result = make_learner().step(samples, nothing, parent)
        assert isinstance(result, Step)
        return result.metrics.get("fresh_abs_log_ratio")

    assert gap(batch, 0) == pytest.approx(metrics["abs_log_ratio"])  # version 0 sampled every token
    assert gap(batch, 1) is None
    first, second, *others = batch
    mixed = replace(first, versions=(VersionRun(0, 1), VersionRun(1, len(first.response_ids) - 1)))
    written = replace(second, is_demonstration=True, reward=None)
    only = step(make_learner(), [first]).metrics["abs_log_ratio"]
    found = gap([mixed, written, *others], 1)
    assert found is not None
    assert found != only  # its first token is of version 0
    assert found == pytest.approx(only, rel=1.0)


def test_samples_that_are_too_long_are_named_and_the_rest_is_trained(
    make_learner: MakeLearner, batch: list[Sample], make_sample: Callable[..., Sample]
) -> None:
    long = make_sample("long", prompt=60, response=5)
    learner, twin = make_learner(), make_learner()
    result = step(learner, [batch[0], long, *batch[1:]])
    assert result.drop == {"long": DropReason.TOO_LONG}
    assert result.metrics["dropped"] == 1
    step(twin, batch)
    assert same(learner, twin)
    nothing_left = make_learner().step([long], nothing)
    assert isinstance(nothing_left, NoStep)
    assert nothing_left.drop == {"long": DropReason.TOO_LONG}


def test_a_long_sample_within_the_limit_goes_alone(
    make_learner: MakeLearner, settings: TrainerSettings, make_sample: Callable[..., Sample]
) -> None:
    small = settings.model_copy(update={"micro_batch_tokens": 64, "max_tokens": 200})
    samples = [make_sample("long", prompt=100, response=20), make_sample("short")]
    learner, wide = make_learner(small), make_learner(small.model_copy(update={"micro_batch_tokens": 1000}))
    step(learner, samples)
    step(wide, samples)
    for name, values in weights(learner).items():
        # Adam divides by the gradient: the rounding of a small one is a share of a whole step.
        torch.testing.assert_close(values, weights(wide)[name], rtol=0, atol=0.01 * small.learning_rate)


def test_numbers_that_are_not_finite_blame_the_samples_only_the_second_time(
    make_learner: MakeLearner, batch: list[Sample]
) -> None:
    learner = make_learner()
    for expected in ({}, {sample.sample_id: DropReason.NON_FINITE for sample in batch}):
        with torch.no_grad():
            next(iter(learner._policy.parameters.values()))[0, 0] = torch.nan
        result = learner.step(batch, nothing)
        assert isinstance(result, NoStep)
        assert result.drop == expected
        learner.load(None, fresh_moments=False)
    step(learner, batch)


def test_an_interruption_passes_through(make_learner: MakeLearner, batch: list[Sample]) -> None:
    learner, calls = make_learner(), 0

    def between() -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        learner.step(batch, between)
    learner.load(None, fresh_moments=False)
    step(learner, batch)


def test_a_version_of_another_base_or_without_its_files_is_refused(
    make_learner: MakeLearner, batch: list[Sample], tmp_path: Path
) -> None:
    learner = make_learner()
    step(learner, batch)
    learner.write(tmp_path)
    with pytest.raises(TrainerError, match="belongs to base"):
        make_learner(base_hash="another").load(tmp_path, fresh_moments=False)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(TrainerError, match="cannot be read"):
        learner.load(tmp_path, fresh_moments=False)
    (tmp_path / "state.json").unlink()
    with pytest.raises(TrainerError, match="cannot be read"):
        learner.load(tmp_path, fresh_moments=False)


def test_one_rng_state_per_version(make_learner: MakeLearner, batch: list[Sample], tmp_path: Path) -> None:
    learner = make_learner()
    step(learner, batch)
    learner.write(tmp_path)
    drawn = torch.rand(3)
    learner.load(tmp_path, fresh_moments=False)
    assert torch.equal(torch.rand(3), drawn)


def test_only_the_adapter_is_named_as_weights(make_learner, tmp_path):
    """SGLang loads every `*.safetensors` of an adapter's folder: moments among them were a layer's weights to it."""
    learner = make_learner()
    learner.load(None, fresh_moments=False)
    learner.write(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["adapter_model.safetensors"]

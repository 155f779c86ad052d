"""Full weights: fp32 masters keep every step, resuming is exact, and any engine loads the folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import torch
from close import assert_close, largest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from openclaw_rl.errors import SettingsError, TrainerError
from openclaw_rl.methods.binary_rl import METHOD, BinarySettings
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.base import Step
from openclaw_rl.trainers.batches import rows_of
from openclaw_rl.trainers.full import FullPolicy
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.types import Sample, WeightKind

FULL = TrainerSettings(learning_rate=1e-3, micro_batch_tokens=64, max_tokens=64)


def full_policy(make: Callable[[], PreTrainedModel], settings: TrainerSettings = FULL) -> FullPolicy:
    return FullPolicy(make(), settings, load_base=make)


def learner_of(policy: FullPolicy, settings: TrainerSettings = FULL) -> LocalLearner:
    learner = LocalLearner(policy, METHOD, settings, BinarySettings(baseline="none"), base_hash="base")
    learner.load(None, fresh_moments=False)
    return learner


def step(learner: LocalLearner, samples: list[Sample]) -> Step:
    result = learner.step(samples, lambda: None)
    assert isinstance(result, Step)
    return result


def weights(policy: FullPolicy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_cut_by_a_restart_equal_steps_in_a_row(
    make_model: Callable[..., LlamaForCausalLM], batch: list[Sample], dtype: torch.dtype, tmp_path: Path
) -> None:
    def make() -> LlamaForCausalLM:
        return make_model(dtype=dtype)

    straight, first = full_policy(make), full_policy(make)
    learner = learner_of(straight)
    for _ in range(3):
        step(learner, batch)
    cut = learner_of(first)
    step(cut, batch)
    assert cut.write(tmp_path) == "model.safetensors"
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    resumed = full_policy(make)
    again = learner_of(resumed)
    again.load(tmp_path, fresh_moments=False)
    for _ in range(2):
        step(again, batch)
    for name, expected in weights(straight).items():
        assert expected.dtype is torch.float32
        assert torch.equal(expected, resumed.parameters[name])
    assert again.kind is WeightKind.FULL


def test_an_engine_loads_what_the_trainer_computes_with(
    make_model: Callable[..., LlamaForCausalLM], batch: list[Sample], tmp_path: Path
) -> None:
    policy = full_policy(lambda: make_model(dtype=torch.bfloat16))
    learner = learner_of(policy)
    step(learner, batch)
    learner.write(tmp_path)
    served = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert served.dtype is torch.bfloat16
    for (name, ours), theirs in zip(policy.model.named_parameters(), served.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_gradients_of_many_passes_are_summed_in_fp32(
    make_model: Callable[..., LlamaForCausalLM], batch: list[Sample]
) -> None:
    """Sixteen-bit sums of small terms stop growing; ours are those of each pass, added in fp32."""
    policy = full_policy(lambda: make_model(dtype=torch.bfloat16))
    terms: dict[str, list[Tensor]] = {name: [] for name in policy.parameters}
    for passed in policy.cut(rows_of(batch), 1):
        sum(values.sum() for values in policy.log_probs(passed).values()).backward()  # type: ignore[union-attr]
        for name, parameter in policy.parameters.items():
            assert parameter.grad is not None
            terms[name].append(parameter.grad.clone())
            parameter.grad = None
    for passed in policy.cut(rows_of(batch), 1):
        sum(values.sum() for values in policy.log_probs(passed).values()).backward()  # type: ignore[union-attr]
    for name, parameter in policy.parameters.items():
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32
        assert_close(parameter.grad, torch.stack(terms[name]).sum(0), scale=largest(terms[name]))
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_steps_too_small_for_sixteen_bits_are_not_lost(
    make_model: Callable[..., LlamaForCausalLM], batch: list[Sample]
) -> None:
    """A weight of 1 moves by 2e-4 a step, and bfloat16 has no number between 1 and 1.0078."""
    slow = FULL.model_copy(update={"learning_rate": 2e-4})
    policy = full_policy(lambda: make_model(dtype=torch.bfloat16), slow)
    learner = learner_of(policy, slow)
    name = next(name for name in policy.parameters if name.endswith("norm.weight"))
    before = policy.parameters[name].detach().clone()
    moved = []
    for _ in range(4):
        step(learner, batch)
        moved.append(float((policy.parameters[name].detach() - before).abs().max()))
    assert moved == sorted(moved)
    assert 0 < moved[0] < moved[-1] < 0.004
    assert torch.equal(dict(policy.model.named_parameters())[name], before.to(torch.bfloat16))


def test_the_reference_is_the_base_and_the_policy_comes_back(
    make_model: Callable[..., LlamaForCausalLM], batch: list[Sample]
) -> None:
    policy, base = full_policy(make_model), full_policy(make_model)
    learner = learner_of(policy, FULL)
    step(learner, batch)
    (passed,) = policy.cut(rows_of(batch), 1000)
    with torch.no_grad():
        before, plain = policy.log_probs(passed), base.log_probs(passed)
        for _ in range(2):
            with policy.reference():
                referenced = policy.log_probs(passed)
            after = policy.log_probs(passed)
            for index in plain:
                assert torch.equal(referenced[index], plain[index])
                assert torch.equal(after[index], before[index])
        assert not torch.equal(before[0], plain[0])


def test_version_zero_and_a_pruned_version_can_be_loaded(
    make_model: Callable[..., LlamaForCausalLM], batch: list[Sample], tmp_path: Path
) -> None:
    policy = full_policy(lambda: make_model(dtype=torch.bfloat16))
    learner = learner_of(policy)
    base = weights(policy)
    step(learner, batch)
    learner.write(tmp_path)
    served = load_file(tmp_path / "model.safetensors")
    learner.load(None, fresh_moments=False)
    assert all(torch.equal(base[name], value) for name, value in weights(policy).items())
    (tmp_path / "optimizer.state").unlink()  # what the trainer prunes: the masters go with it
    learner.load(tmp_path, fresh_moments=True)
    for name, value in weights(policy).items():
        assert torch.equal(value, served[name].float())


def test_weights_of_another_model_are_refused(
    make_model: Callable[..., LlamaForCausalLM], architecture: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    other = make_model()
    other.resize_token_embeddings(60)
    other.save_pretrained(tmp_path)
    with pytest.raises(TrainerError, match="another model"):
        full_policy(architecture).load(tmp_path)
    with pytest.raises(SettingsError, match="full weights are trained in 16 or 32 bits"):
        full_policy(make_model, FULL.model_copy(update={"quantise": "4bit"}))


@pytest.mark.parametrize(
    ("was", "now"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
)
def test_weights_of_another_precision_are_taken_exactly_and_it_is_told(
    make_model: Callable[..., LlamaForCausalLM],
    batch: list[Sample],
    tmp_path: Path,
    was: torch.dtype,
    now: torch.dtype,
) -> None:
    """The setting `trainer.dtype` between two starts: the fp32 masters are the same, only what computes is rounded."""
    before = full_policy(lambda: make_model(dtype=was))
    learner = learner_of(before)
    step(learner, batch)
    learner.write(tmp_path)
    after = full_policy(lambda: make_model(dtype=now))
    with structlog.testing.capture_logs() as lines:
        learner_of(after).load(tmp_path, fresh_moments=False)
    for name, expected in weights(before).items():
        assert torch.equal(expected, after.parameters[name])
    told = [(line["was"], line["now"]) for line in lines if line["event"] == "precision_changed"]
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    assert told == ([] if was is now else [(names[was], names[now])])

"""The EMA teacher is the mean of the versions' products, an adapter that PEFT loads, and goes on after a restart."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from close import assert_close
from peft import PeftModel
from tolerances import rel
from torch import Tensor
from transformers import LlamaForCausalLM

from openclaw_combine.method import CombineSettings
from openclaw_rl.methods.base import Method
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers import checkpoint
from openclaw_rl.trainers.base import Step
from openclaw_rl.trainers.checkpoint import EMA_FOLDER
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.trainers.lora import EmaTeacher, LoraPolicy
from openclaw_rl.types import Sample

DECAY = 0.75


@pytest.fixture
def policy(make_model: Callable[..., LlamaForCausalLM], settings: TrainerSettings) -> LoraPolicy:
    policy = LoraPolicy(make_model(), settings)
    policy.reset(0)
    return policy


@torch.no_grad()
def draw(policy: LoraPolicy, seed: int, *, only_b: bool = False) -> None:
    """Another version."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.parameters.items():
        if not only_b or ".lora_B." in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def products(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = [name for name in tensors if ".lora_A." in name]
    return {name: (tensors[name.replace("_A.", "_B.")].double() @ tensors[name].double()) for name in names}


def test_it_starts_as_the_base_and_is_the_mean_of_products(policy: LoraPolicy) -> None:
    """Versions that share A are in one space of the adapter's rank, so the mean is exact."""
    teacher, expected = EmaTeacher(policy, DECAY), {name: 0.0 for name in products(policy.tensors())}
    teacher.load(None)
    assert not any(product.any() for product in products(teacher._mean).values())
    for seed in range(4):
        draw(policy, seed, only_b=True)
        assert teacher.follow() < rel()
        new = products(policy.tensors())
        expected = {name: DECAY * expected[name] + (1 - DECAY) * new[name] for name in new}
        for name, product in products(teacher._mean).items():
            assert_close(product, expected[name], dtype=torch.float32)


def test_what_the_rank_leaves_out_is_the_least_and_is_told(policy: LoraPolicy) -> None:
    teacher = EmaTeacher(policy, DECAY)
    draw(policy, 1)
    teacher.load(Path("/no/version/with/a/teacher"))
    old = products(policy.tensors())
    draw(policy, 2)
    share = teacher.follow()
    new, squared, whole = products(policy.tensors()), 0.0, 0.0
    for name, product in products(teacher._mean).items():
        mean = DECAY * old[name] + (1 - DECAY) * new[name]
        tail = torch.linalg.svdvals(mean)[2:]  # rank 2: Eckart and Young say that no adapter comes nearer
        assert float((mean - product).norm()) == pytest.approx(float(tail.norm()), rel=rel(ulps=1024))
        squared, whole = squared + float(tail.square().sum()), whole + float(mean.square().sum())
    assert share == pytest.approx((squared / whole) ** 0.5, rel=rel(ulps=1024))
    assert 0.05 < share < 0.9


def test_other_factors_of_the_same_policy_give_the_same_mean(policy: LoraPolicy) -> None:
    """A mean of the factors fails here: (B R)(R⁻¹ A) is the same policy."""
    draw(policy, 3)
    found = []
    for turned in (False, True):
        teacher = EmaTeacher(policy, DECAY)
        teacher.load(None)
        if turned:
            turn = torch.tensor([[2.0, 1.0], [0.0, -0.5]])
            with torch.no_grad():
                for name, parameter in policy.parameters.items():
                    parameter.copy_(torch.linalg.inv(turn) @ parameter if ".lora_A." in name else parameter @ turn)
        teacher.follow()
        found.append(products(teacher._mean))
    for name, product in found[0].items():
        assert_close(product, found[1][name], ulps=1024, dtype=torch.float32)


def test_it_is_an_adapter_that_peft_loads(
    policy: LoraPolicy, make_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    teacher = EmaTeacher(policy, DECAY)
    teacher.load(None)
    draw(policy, 4)
    teacher.follow()
    teacher.write(tmp_path)
    loaded = PeftModel.from_pretrained(make_model(), tmp_path / EMA_FOLDER)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        mean = loaded(input_ids=ids).logits
        for name, parameter in policy.parameters.items():  # one version after the base: a quarter of it
            if ".lora_B." in name:
                parameter.mul_(1 - DECAY)
        assert_close(policy.model(input_ids=ids).logits, mean, ulps=1024)


@pytest.fixture
def learner(make_model: Callable[..., LlamaForCausalLM], settings: TrainerSettings) -> Callable[[str], LocalLearner]:
    class Anything:
        """Binary RL under another name: the teacher does not depend on the method."""

        from openclaw_rl.methods.binary_rl import METHOD

        name = "combine"

        def __getattr__(self, attribute: str) -> object:
            return getattr(self.METHOD, attribute)

    def make(teacher: str) -> LocalLearner:
        method = CombineSettings(teacher=teacher, ema_decay=DECAY)  # type: ignore[arg-type]
        anything: Method = Anything()  # type: ignore[assignment]
        learner = LocalLearner(LoraPolicy(make_model(), settings), anything, settings, method, base_hash="base")
        learner.load(None, fresh_moments=False)
        return learner

    return make


def step(learner: LocalLearner, samples: list[Sample]) -> Step:
    done = learner.step(samples, lambda: None)
    assert isinstance(done, Step)
    return done


def written(learner: LocalLearner, versions: Path, name: str) -> Path:
    return checkpoint.write(versions, name, lambda folder: str(learner.write(folder)) and None)


def test_a_restart_goes_on_where_it_was(
    learner: Callable[[str], LocalLearner], batch: list[Sample], tmp_path: Path
) -> None:
    straight, first, resumed = (learner("ema") for _ in range(3))
    for _ in range(2):
        step(straight, batch)
        assert step(first, batch).metrics["ema_truncation"] < 0.1, "versions that follow each other differ little"
    resumed.load(written(first, tmp_path, "two"), fresh_moments=False)
    for one in (straight, resumed):
        step(one, batch)
    names = ("straight", "resumed")
    folders = [written(one, tmp_path, name) for one, name in zip((straight, resumed), names, strict=True)]
    checkpoint.verify(folders[1])
    files = [(folder / EMA_FOLDER / "adapter_model.safetensors").read_bytes() for folder in folders]
    assert files[0] == files[1]  # bit for bit
    assert files[0] != (tmp_path / "two" / EMA_FOLDER / "adapter_model.safetensors").read_bytes()


def test_a_torn_teacher_is_a_torn_version(
    learner: Callable[[str], LocalLearner], batch: list[Sample], tmp_path: Path
) -> None:
    one = learner("ema")
    step(one, batch)
    folder = written(one, tmp_path, "v")
    (folder / EMA_FOLDER / "adapter_model.safetensors").unlink()
    assert not checkpoint.is_whole(folder)


def test_a_version_from_before_starts_a_teacher_as_itself(
    learner: Callable[[str], LocalLearner], batch: list[Sample], tmp_path: Path
) -> None:
    before, after = learner("base"), learner("ema")
    step(before, batch)
    folder = written(before, tmp_path, "before")
    assert not (folder / EMA_FOLDER).exists()
    after.load(folder, fresh_moments=False)
    written(after, tmp_path, "after")
    for mean in products(after._teacher._mean).values():  # type: ignore[union-attr]
        assert bool(torch.isfinite(mean).all())
    assert (tmp_path / "after" / EMA_FOLDER / "adapter_model.safetensors").read_bytes() == (
        folder / "adapter_model.safetensors"
    ).read_bytes()

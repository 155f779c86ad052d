"""The base in the precision that was asked for. (Quantised ones need a GPU: `scripts/benchmarks/trainer_speed.py`.)"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from close import assert_close
from transformers import LlamaForCausalLM

from openclaw_rl.errors import SettingsError
from openclaw_rl.models.resolve import ResolvedModel
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers import base_model
from openclaw_rl.trainers.batches import rows_of
from openclaw_rl.trainers.full import FullPolicy
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Sample, WeightKind


@pytest.fixture
def resolved(make_model: Callable[..., LlamaForCausalLM], tmp_path: Path) -> ResolvedModel:
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)
    return ResolvedModel("toy", folder, tmp_path / "hash")


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", "auto", torch.float32),
        ("cuda", "auto", torch.bfloat16),
        ("cuda:1", "float32", torch.float32),
        ("cpu", "bfloat16", torch.bfloat16),
    ],
)
def test_a_gpu_holds_sixteen_bits(device: str, dtype: str, expected: torch.dtype) -> None:
    settings = TrainerSettings.model_validate({"device": device, "dtype": dtype})
    assert base_model.dtype_of(settings) is expected
    assert settings.token_budget == (1024 if device == "cpu" else 8192)


def test_what_is_trained_is_what_the_run_says(resolved: ResolvedModel, batch: list[Sample]) -> None:
    settings = TrainerSettings(rank=2, alpha=8)
    lora = base_model.make_policy(WeightKind.LORA, resolved, settings)
    full = base_model.make_policy(WeightKind.FULL, resolved, settings)
    assert isinstance(lora, LoraPolicy)
    assert isinstance(full, FullPolicy)
    lora.reset(0)
    full.reset(0)
    for passed in lora.cut(rows_of(batch), 1000):
        ours, theirs = lora.log_probs(passed), full.log_probs(passed)
        for index in ours:
            assert_close(ours[index], theirs[index])


def test_a_missing_library_is_named(resolved: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r'"4bit" needs bitsandbytes and accelerate: pip install "openclaw-rl'):
        base_model.load(resolved, TrainerSettings(quantise="4bit", device="cuda"))
    with pytest.raises(SettingsError, match="needs a GPU"):
        base_model.load(resolved, TrainerSettings(quantise="8bit"))

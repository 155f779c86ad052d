"""The trainer's half of a method from another package: the config holds its settings, and a step trains with it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from plug_in import LENGTH, install
from transformers import LlamaForCausalLM

from openclaw_rl.methods.base import load_method
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.base import Step
from openclaw_rl.trainers.learner import LocalLearner
from openclaw_rl.trainers.local import TrainerConfig
from openclaw_rl.trainers.lora import LoraPolicy
from openclaw_rl.types import Sample


def test_a_step_with_a_method_of_another_package(
    make_model: Callable[..., LlamaForCausalLM],
    settings: TrainerSettings,
    batch: list[Sample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, "length", LENGTH)
    monkeypatch.syspath_prepend(tmp_path)
    given = {"url": "http://s", "token": "t", "data_dir": tmp_path, "cache_dir": tmp_path}
    config = TrainerConfig.model_validate(given | {"method": {"name": "length", "target_tokens": 4}})
    assert config.method.model_dump()["target_tokens"] == 4
    method = load_method(config.method.name)
    learner = LocalLearner(LoraPolicy(make_model(), settings), method, settings, config.method, base_hash="base")
    learner.load(None, fresh_moments=False)
    done = learner.step(batch, lambda: None)
    assert isinstance(done, Step)
    assert done.metrics["samples"] == len(batch)
    assert done.metrics["grad_norm"] > 0

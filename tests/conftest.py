"""For the whole suite: no example is failed for being slow (a busy machine is not a bug, and time is for benchmarks),
and models that several packages are tested on.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from harness.host import Host
    from transformers import LlamaForCausalLM

settings.register_profile("untimed", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def loggers_start_anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that a test runs configures logging for the whole process, and a logger keeps for good what it was
    first used with: the next test would find its lines filtered. `keeps_loggers` leaves that as it is."""
    configure = structlog.configure
    if request.node.get_closest_marker("keeps_loggers") is None:
        monkeypatch.setattr(
            structlog, "configure", lambda **given: configure(**given | {"cache_logger_on_first_use": False})
        )
    yield
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def bundled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the bundled model, converted once for the whole suite: conversion takes half a minute."""
    from openclaw_rl.models.resolve import tokenizer_folder
    from openclaw_rl.settings import ModelSettings

    cache = tmp_path_factory.mktemp("bundled-cache")
    tokenizer_folder(ModelSettings(), cache)
    return cache


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model of words that cases are told in, and servers over a stub engine speak."""
    from harness.model import make_folder

    folder = tmp_path_factory.mktemp("word-model")
    make_folder(folder)
    return folder


@pytest.fixture(scope="session")
def host(model_folder: Path) -> "Iterator[Host]":
    """Server processes of that model, forked from one that has everything imported."""
    from harness.host import Host

    with Host(model_folder) as host:
        yield host


@pytest.fixture
def make_model() -> "Callable[..., LlamaForCausalLM]":
    """`make_model(seed=0, dtype=torch.float32)`: a random Llama of a few thousand parameters and 64 ids."""
    import torch  # most tests here need neither
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.4,
        )
        model = LlamaForCausalLM(config).to(dtype).eval()
        if dtype is torch.float64:
            _true_float64(model)
        return model

    return make


def _true_float64(model: "LlamaForCausalLM") -> None:
    """transformers' RMSNorm rounds to fp32 inside; torch's does not: float64 gradients can be compared to 1e-9."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            norm = torch.nn.RMSNorm(module.weight.shape[0], eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            model.set_submodule(name, norm)

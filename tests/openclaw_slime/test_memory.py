"""The estimate of an actor GPU's memory, beside numbers by hand and the sizes that models are known by."""

import pytest

from openclaw_slime.arguments import QWEN3_4B
from openclaw_slime.layout import Layout
from openclaw_slime.memory import actor_memory, parameters

MIXED = {"num_experts": 128, "moe_intermediate_size": 768, "tie_word_embeddings": False, "num_key_value_heads": 4}
SIZES = [
    (QWEN3_4B, 4.02e9),
    ({**QWEN3_4B, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}, 8.19e9),
    ({**QWEN3_4B, **MIXED, "hidden_size": 2048, "num_hidden_layers": 48}, 30.5e9),
]
"""Qwen3 4B, 8B and 30B-A3B, as their model cards say."""


@pytest.mark.parametrize(("config", "count"), SIZES)
def test_parameters_are_those_of_the_model_cards(config: dict[str, object], count: float) -> None:
    assert parameters(config) == pytest.approx(count, rel=0.01)


def test_bytes_by_hand() -> None:
    """Qwen3-4B at TP 2, CP 1, PP 2 on 8 GPUs: two replicas; 100 tokens."""
    layout = Layout(12, 8, actor_tp=2, pipeline_parallel=2)
    found, count = actor_memory(QWEN3_4B, layout, 100), parameters(QWEN3_4B)
    assert (found.weights, found.gradients, found.optimizer) == (2 * count / 4, 4 * count / 4, 12 * count / 8)
    assert found.activations == 2 * 100 * ((18 + 34) * 2560 + 2 * 151936) / 2


def test_the_scripts_layout_of_a_4b_model_fits_with_its_optimizer_and_a_32b_model_does_not() -> None:
    small = actor_memory(QWEN3_4B, Layout(), 32768)
    assert small.fits(80, optimizer_on_cpu=False)
    assert not small.fits(24, optimizer_on_cpu=False)
    shape = {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
    large = actor_memory({**QWEN3_4B, **shape, "tie_word_embeddings": False}, Layout(12, 8, actor_tp=8), 16384)
    assert not large.fits(80, optimizer_on_cpu=False)
    assert large.fits(80, optimizer_on_cpu=True)
    assert "optimizer 49.1 (on the CPU)" in large.line(80, optimizer_on_cpu=True)

"""The calculator: shapes are read as they are, and sums say what they should."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from openclaw_rl.errors import SettingsError
from openclaw_rl.models import memory
from openclaw_rl.models.memory import GIB, ModelShape, activation_bytes, largest_context, share, training

QWEN3_4B = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SHAPE = ModelShape.of(QWEN3_4B)


def test_the_shape_of_a_known_model() -> None:
    assert SHAPE.parameters == pytest.approx(4.02e9, rel=0.01)  # what its card says
    assert SHAPE.kv_token == 2 * 36 * 8 * 128 * 2
    assert SHAPE.weights() == pytest.approx(8.05e9, rel=0.01)
    assert SHAPE.adapter_parameters(16) == 33_030_144  # PEFT's own count for the seven projections


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_a_folder_are_counted_in_its_files(tmp_path: Path, tied: bool) -> None:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    shape = ModelShape.of_folder(tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    guessed = ModelShape.of(json.loads((tmp_path / "config.json").read_text())).parameters
    assert guessed == pytest.approx(shape.parameters, rel=0.01)  # but for the norms of Qwen's heads


def test_a_folder_that_says_nothing_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"config\.json cannot be read"):
        ModelShape.of_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(SettingsError, match="does not say the model's shape"):
        ModelShape.of_folder(tmp_path)


def test_full_weights_take_eighteen_bytes_a_parameter() -> None:
    memory = training(SHAPE, 0, weights="full")
    assert (memory.weights + memory.trained) / SHAPE.parameters == pytest.approx(18, rel=0.01)


@given(st.floats(4, 200), st.floats(1, 100))
def test_more_memory_never_trains_less(gib: float, more: float) -> None:
    for quantise in memory.QUANTISATIONS:
        small, large = (largest_context(SHAPE, size * GIB, quantise=quantise) for size in (gib, gib + more))
        assert 0 <= small <= large
        if large:
            held = training(SHAPE, large, quantise=quantise).total
            assert held <= (gib + more) * GIB
    assert activation_bytes(SHAPE, recompute=True) < activation_bytes(SHAPE, recompute=False) / 5


def test_what_fits_is_said_for_people() -> None:
    lines = memory.report(SHAPE, 24)
    assert lines[0].startswith("4.02 B parameters on 24 GB")
    contexts = [budget.context for budget in share(SHAPE, 24 * GIB)]
    assert contexts == sorted(contexts)
    assert contexts[0] > 0
    assert sum("LoRA" in line for line in lines) == 4
    assert "does not fit" in memory.report(SHAPE, 8)[1]

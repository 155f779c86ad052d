import json

import pytest

from openclaw_rl.engines.embedded.llama_model import read_shape
from openclaw_rl.engines.embedded.process import context_length, end_ids
from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import ModelSettings


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_end_tokens_come_from_everything_that_names_them(tmp_path):
    write(
        tmp_path,
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [7, 8]},
        tokenizer_config={"eos_token": {"content": "<end>"}},
        tokenizer={"added_tokens": [{"id": 9, "content": "<end>"}, {"id": 10, "content": "<other>"}]},
    )
    assert end_ids(tmp_path) == {7, 8, 9}


def test_a_model_may_have_no_end_token(tmp_path):
    write(tmp_path, config={"eos_token_id": None})
    assert end_ids(tmp_path) == frozenset()


def test_the_context_is_the_models_own_or_less(tmp_path):
    write(tmp_path, config={"max_position_embeddings": 256})
    assert context_length(tmp_path, ModelSettings()) == 256
    assert context_length(tmp_path, ModelSettings(context_length=100)) == 100
    with pytest.raises(SettingsError, match="own 256"):
        context_length(tmp_path, ModelSettings(context_length=300))
    write(tmp_path, config={})
    with pytest.raises(SettingsError, match="states no context length"):
        context_length(tmp_path, ModelSettings())


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma2"},
        {"hidden_act": "gelu"},
        {"sliding_window": 128},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"rms_norm_eps": None},
    ],
)
def test_what_the_fast_forward_does_not_compute_is_left_to_transformers(tmp_path, make_tiny, change):
    config = json.loads((make_tiny("llama").folder / "config.json").read_text())
    write(tmp_path, config=config)
    assert read_shape(tmp_path) is not None
    changed = {key: value for key, value in (config | change).items() if value is not None}
    write(tmp_path, config=changed)
    assert read_shape(tmp_path) is None


def test_configurations_from_before_transformers_5_are_read(tmp_path, make_tiny):
    config = json.loads((make_tiny("llama").folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    write(tmp_path, config=config | {"rope_theta": rope["rope_theta"], "rope_scaling": None})
    assert read_shape(tmp_path) == read_shape(make_tiny("llama").folder)


def test_a_window_that_is_switched_off_is_none(tmp_path, make_tiny):
    config = json.loads((make_tiny("qwen2").folder / "config.json").read_text())
    write(tmp_path, config=config | {"sliding_window": 64, "use_sliding_window": False})
    assert read_shape(tmp_path) is not None

import json

import pytest

from openclaw_rl.errors import SettingsError
from openclaw_slime.model_shape import QWEN3_4B, model_arguments, read_config


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_qwen3_4b():
    arguments = model_arguments(QWEN3_4B)
    assert value(arguments, "--num-layers") == "36"
    assert value(arguments, "--kv-channels") == "128"  # not hidden / heads: 2560 / 32 = 80
    assert "--qk-layernorm" in arguments
    assert "--add-qkv-bias" not in arguments
    assert "--untie-embeddings-and-output-weights" not in arguments


def test_qwen2_has_biases_and_llama_neither():
    shape = {**QWEN3_4B, "head_dim": None, "tie_word_embeddings": False}
    qwen2, llama = (model_arguments({**shape, "model_type": kind}) for kind in ("qwen2", "llama"))
    assert "--add-qkv-bias" in qwen2
    assert "--add-qkv-bias" not in llama
    assert "--qk-layernorm" not in qwen2 + llama
    assert value(llama, "--kv-channels") == "80"
    assert "--untie-embeddings-and-output-weights" in llama


def test_newer_configs_keep_the_rope_base_in_rope_parameters():
    config = {key: what for key, what in QWEN3_4B.items() if key != "rope_theta"}
    assert value(model_arguments({**config, "rope_parameters": {"rope_theta": 1e6}}), "--rotary-base") == "1000000"
    with pytest.raises(SettingsError, match="rope_theta"):
        model_arguments(config)


def test_an_architecture_without_a_map_is_refused_by_name():
    with pytest.raises(SettingsError, match="'mamba' is not one of qwen2, qwen3, llama"):
        model_arguments({"model_type": "mamba"})


def test_a_folder_without_a_config_is_refused_by_name(tmp_path):
    with pytest.raises(SettingsError, match="no readable config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dict(QWEN3_4B)))
    assert read_config(tmp_path) == QWEN3_4B

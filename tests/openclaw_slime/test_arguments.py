import json
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.errors import SettingsError
from openclaw_slime.arguments import QWEN3_4B, NodeOptions, model_arguments, read_config, slime_arguments
from openclaw_slime.layout import Layout

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def shape(kind: str, hidden: int, ffn: int, layers: int, heads: int, groups: int, vocab: int, **more: Any) -> dict:
    """As the model's config.json says it."""
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocab}
    usual = {"rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True, "hidden_act": "silu"}
    return {"model_type": kind, **sizes, **usual, **more}


MODELS = {
    "qwen3-0.6B": shape("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128),
    "qwen3-1.7B": shape("qwen3", 2048, 6144, 28, 16, 8, 151936, head_dim=128),
    "qwen3-4B": shape("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, attention_bias=False),
    "qwen3-8B": shape("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=False),
    "qwen2.5-0.5B": shape("qwen2", 896, 4864, 24, 14, 2, 151936, use_sliding_window=False, sliding_window=32768),
    "qwen2.5-7B": shape("qwen2", 3584, 18944, 28, 28, 4, 152064, tie_word_embeddings=False),
    "llama3.2-3B-Instruct": shape(
        "llama", 3072, 8192, 28, 24, 8, 128256, head_dim=128, rope_theta=500000.0, rms_norm_eps=1e-5,
        rope_scaling={**LLAMA3, "factor": 32.0},
    ),
    "llama3.1-8B-Instruct": shape(
        "llama", 4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_scaling={**LLAMA3, "factor": 8.0}, mlp_bias=False,
    ),
}  # fmt: skip
MODELS |= {
    name: shape(
        "qwen3_moe", hidden, ffn, layers, heads, 4, 151936, head_dim=128, tie_word_embeddings=False, num_experts=128,
        moe_intermediate_size=expert, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], use_sliding_window=False, attention_bias=False,
    )
    for name, hidden, ffn, layers, heads, expert in (
        ("qwen3-30B-A3B", 2048, 6144, 48, 32, 768),
        ("qwen3-235B-A22B", 4096, 12288, 94, 64, 1536),
    )
}  # fmt: skip
QWEN3_5 = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
MODELS |= {
    name: {
        "model_type": "qwen3_5",
        "tie_word_embeddings": is_tied,
        "vision_config": {"hidden_size": 1152},
        "text_config": {
            **shape("qwen3_5_text", hidden, ffn, layers, heads, groups, 248320, head_dim=256, attention_bias=False),
            "tie_word_embeddings": is_tied,
            "rope_theta": None,
            "rope_parameters": QWEN3_5,
        },
    }
    for name, hidden, ffn, layers, heads, groups, is_tied in (
        ("qwen3.5-0.8B", 1024, 3584, 24, 8, 2, True),
        ("qwen3.5-4B", 2560, 9216, 32, 16, 4, True),
        ("qwen3.5-9B", 4096, 12288, 32, 16, 4, False),
        ("qwen3.5-27B", 5120, 17408, 64, 24, 4, False),
    )
}
"""Those that slime has a script for too."""


def table(words: Iterable[str]) -> dict[str, list[object]]:
    """Flag → values, numbers as numbers."""
    found: dict[str, list[object]] = {}
    for word in words:
        if word.startswith("--"):
            values = found.setdefault(word, [])
        else:
            values.append(float(word) if re.fullmatch(r"[\d.e-]+", word) else word)
    return found


def their_words(script: Path) -> list[str]:
    """The words of `MODEL_ARGS`, as bash has them."""
    shown = subprocess.run(
        ["bash", "-c", 'source "$0" && printf "%s\\n" "${MODEL_ARGS[@]}"', str(script)],
        capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    return shown.stdout.splitlines()


@pytest.mark.parametrize("name", MODELS)
def test_a_models_arguments_are_those_of_slimes_own_script(name: str) -> None:
    root = Path(os.environ.get("SLIME_ROOT", Path(__file__).parents[3] / "slime"))
    script = root / "scripts" / "models" / f"{name}.sh"
    if not script.is_file():
        pytest.skip("no slime checkout: set SLIME_ROOT")
    theirs, ours = table(their_words(script)), table(model_arguments(MODELS[name]))
    if theirs.pop("--position-embedding-type", None) == ["rope"]:  # the newer name
        theirs["--use-rotary-position-embeddings"] = []
    if theirs.get("--rotary-percent") == [1.0]:  # the default
        del theirs["--rotary-percent"]
    theirs.pop("--use-gated-attention", None)  # neither slime nor Megatron has it; --attention-output-gate is the gate
    theirs.pop("--max-position-embeddings", None)
    theirs.setdefault("--kv-channels", ours["--kv-channels"])
    if "--rotary-scaling-factor" in theirs:  # Megatron has no such argument; what it has is named otherwise
        theirs["--rope-scaling-factor"] = theirs.pop("--rotary-scaling-factor")
    assert ours == theirs


def test_the_shape_that_a_dry_run_shows_is_that_of_qwen3_4b() -> None:
    assert table(model_arguments(QWEN3_4B)) == table(model_arguments(MODELS["qwen3-4B"])) | {"--rotary-base": [5e6]}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("qwen3-4B", {"--qk-layernorm": [], "--kv-channels": [128.0]}),  # not hidden / heads: 80
        ("qwen2.5-7B", {"--add-qkv-bias": [], "--kv-channels": [128.0], "--untie-embeddings-and-output-weights": []}),
        ("llama3.2-3B-Instruct", {"--use-rope-scaling": [], "--rope-scaling-factor": [32.0]}),
    ],
)
def test_what_an_architecture_has_of_its_own(name: str, flags: dict[str, list[object]]) -> None:
    own = {"--qk-layernorm", "--add-qkv-bias", "--untie-embeddings-and-output-weights", "--use-rope-scaling"}
    given = table(model_arguments(MODELS[name]))
    assert {flag: given[flag] for flag in flags} == flags
    assert given.keys() & own == flags.keys() & own


@pytest.mark.real_model
def test_the_bundled_model_has_a_map(bundled_cache: Path) -> None:
    (config,) = bundled_cache.rglob("config.json")
    smollm = table(model_arguments(read_config(config.parent)))
    fp32_eps = 9.999999747378752e-06  # 1e-5 as a GGUF holds it; slime compares it with the config to the last digit
    expected = shape("llama", 576, 1536, 30, 9, 3, 49152, rms_norm_eps=fp32_eps, rope_theta=100000)
    assert smollm == table(model_arguments(expected))


@pytest.mark.parametrize("name", MODELS)
def test_newer_configs_keep_the_rope_in_rope_parameters(name: str) -> None:
    old = MODELS[name]
    if "text_config" in old:
        pytest.skip("its config is a newer one")
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    rope = {"rope_type": "default", "rope_theta": old["rope_theta"], **old.get("rope_scaling", {})}
    assert model_arguments({**new, "rope_parameters": rope}) == model_arguments(old)
    with pytest.raises(SettingsError, match="rope_theta"):
        model_arguments(new)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "'mamba' is not one of qwen2, qwen3, llama, qwen3_moe, qwen3_5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_scaling": {**LLAMA3, "factor": 8.0, "high_freq_factor": 2.0}}, "'high_freq_factor': 2.0"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "HF_CKPT: its weights are quantised (fp8)"),
    ],
)
def test_what_has_no_map_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(says)):
        model_arguments({**QWEN3_4B, **change})


def test_a_folder_without_a_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no readable config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dict(QWEN3_4B)))
    assert read_config(tmp_path) == QWEN3_4B


def test_layers_without_experts_are_named_and_a_router_that_megatron_has_not_is_refused() -> None:
    config = {**MODELS["qwen3-30B-A3B"], "num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    assert table(model_arguments(config))["--moe-layer-freq"] == ["[0,1,0,0,0,1]"]
    with pytest.raises(SettingsError, match="norm_topk_prob false"):
        model_arguments({**config, "norm_topk_prob": False})


@pytest.mark.parametrize("name", ["qwen3-30B-A3B", "qwen3.5-4B"])
def test_layers_that_our_own_spec_lacks_need_transformer_engine(name: str) -> None:
    options = NodeOptions("CK", optimizer_on_cpu=False)
    assert slime_arguments(options, MODELS[name]).count("--spec") == (name == "qwen3.5-4B")
    with pytest.raises(SettingsError, match="needs Transformer Engine"):
        slime_arguments(replace(options, has_transformer_engine=False), MODELS[name])


@pytest.mark.parametrize(
    ("layout", "name", "says"),
    [
        ({"actor_gpus": 8, "actor_tp": 8}, "qwen2.5-0.5B", "TP 8 does not divide the model's 14 attention heads"),
        ({"actor_tp": 4}, "qwen2.5-7B", None),
        ({"actor_gpus": 8, "actor_tp": 8}, "qwen3-30B-A3B", "TP 8 does not divide the model's 4 key and value heads"),
        ({"actor_gpus": 8, "actor_tp": 1, "pipeline_parallel": 8}, "qwen3-4B", "PP 8 does not divide the 36 layers"),
        ({"actor_tp": 1, "pipeline_parallel": 4}, "qwen3-4B", None),
    ],
)
def test_a_model_that_the_layout_cannot_cut_is_refused(layout: dict[str, int], name: str, says: str | None) -> None:
    options = NodeOptions("CK", layout=Layout(12, engine_tp=2, **layout), batch_size=16)
    if says is None:
        words = table(slime_arguments(options, MODELS[name]))
        assert words["--pipeline-model-parallel-size"] == [float(layout.get("pipeline_parallel", 1))]
        return
    with pytest.raises(SettingsError, match=re.escape(says)):
        slime_arguments(options, MODELS[name])


@pytest.mark.parametrize(
    ("name", "tp", "says"),
    [
        ("qwen3-4B", 4, None),
        ("qwen2.5-7B", 4, "mapped for qwen3 alone, not for qwen2"),
        ("qwen3-30B-A3B", 4, "not for qwen3_moe"),
        ("qwen3-4B", 8, "the layer of a rank is 1216, no multiple of 128"),
        ("qwen3-0.6B", 8, None),
    ],
)
def test_fp8_needs_blocks_of_its_scale(name: str, tp: int, says: str | None) -> None:
    options = NodeOptions("CK", layout=Layout(12, actor_gpus=8, actor_tp=tp), precision="fp8")
    if says is None:
        assert table(slime_arguments(options, MODELS[name]))["--fp8-recipe"] == ["blockwise"]
        return
    with pytest.raises(SettingsError, match=re.escape(says)):
        slime_arguments(options, MODELS[name])

"""The node's settings as slime's command line: one table, pure functions, no import of slime.

`model_arguments` reads Megatron's model arguments from the checkpoint's `config.json`. slime compares them with the
checkpoint and refuses a difference, so no table of models is kept. Decoders with grouped-query attention: Qwen2, Qwen3,
Llama (SmolLM is one), Qwen3's mixture of experts, and dense Qwen3.5, whose linear attention is slime's own layer.

A comment at each group gives the reason for what differs from slime's defaults. `HOOKS` is the whole surface of the
plugin; the contract tests check each hook against the pinned slime.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclaw_rl.errors import SettingsError
from openclaw_rl.settings import installed_methods
from openclaw_slime.layout import Layout
from openclaw_slime.memory import CARD_GB

QWEN3_4B: Mapping[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""The shape of Qwen3-4B-Thinking-2507, so that `--dry-run` shows the real argv without a checkpoint."""

_PLAIN: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}
"""Values that the map assumes; a checkpoint with others would be trained as another model."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only factors of Llama 3's scaling that Megatron supports."""
_MIXED, _LINEAR = "qwen3_moe", "qwen3_5"
_KINDS = ("qwen2", "qwen3", "llama", _MIXED, _LINEAR)
_HAVE_QK_NORM = frozenset({"qwen3", _MIXED, _LINEAR})
_HAVE_QKV_BIAS = frozenset({"qwen2"})
_NEED_TRANSFORMER_ENGINE = frozenset({_MIXED, _LINEAR})
"""Architectures whose layers our own spec does not have."""


def read_config(checkpoint: Path) -> Mapping[str, Any]:
    """Read the checkpoint's `config.json`. Raises SettingsError if it cannot be read."""
    try:
        config: Mapping[str, Any] = json.loads((checkpoint / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(f"HF_CKPT {checkpoint}: no readable config.json ({error})") from error
    return config


def model_arguments(config: Mapping[str, Any]) -> list[str]:
    """Return Megatron's arguments for this architecture. Raises SettingsError for an unmapped one."""
    kind = config.get("model_type")
    if kind not in _KINDS:
        raise SettingsError(f"HF_CKPT: architecture {kind!r} is not one of {', '.join(_KINDS)}")
    if quantised := config.get("quantization_config"):
        raise SettingsError(
            f"HF_CKPT: its weights are quantised ({quantised.get('quant_method')}). Megatron starts from them, and "
            "slime reads unquantised tensors only: use the checkpoint in bfloat16"
        )
    # Qwen3.5 has a vision part beside the text model; slime trains and sends the text model.
    config = {"tie_word_embeddings": config.get("tie_word_embeddings", False), **(config.get("text_config") or config)}
    heads = config["num_attention_heads"]
    for name, plain in _PLAIN.items():
        if config.get(name, plain) not in (plain, None):
            raise SettingsError(f"HF_CKPT: config.json has {name} {config[name]!r}; only {plain!r} is mapped")
    arguments = ["--swiglu", "--num-layers", config["num_hidden_layers"], "--hidden-size", config["hidden_size"]]
    arguments += ["--ffn-hidden-size", config["intermediate_size"], "--num-attention-heads", heads]
    arguments += ["--group-query-attention", "--num-query-groups", config.get("num_key_value_heads", heads)]
    arguments += ["--kv-channels", config.get("head_dim") or config["hidden_size"] // heads]
    arguments += ["--use-rotary-position-embeddings", *_rope(config), "--disable-bias-linear"]
    arguments += ["--normalization", "RMSNorm", "--norm-epsilon", config["rms_norm_eps"]]
    arguments += ["--vocab-size", config["vocab_size"]]
    if kind in _HAVE_QK_NORM:
        arguments.append("--qk-layernorm")
    if kind in _HAVE_QKV_BIAS:
        arguments.append("--add-qkv-bias")
    if kind == _MIXED:
        arguments += _experts(config)
    if kind == _LINEAR:
        arguments += ["--spec", "slime_plugins.models.qwen3_5", "get_qwen3_5_spec"]
        arguments += ["--apply-layernorm-1p", "--attention-output-gate"]
    if not config.get("tie_word_embeddings", False):
        arguments.append("--untie-embeddings-and-output-weights")
    return [str(argument) for argument in arguments]


def _experts(config: Mapping[str, Any]) -> list[object]:
    """Return the arguments of a mixture of experts. Raises SettingsError for a router that is not mapped."""
    # Megatron's softmax comes after the choice of the experts, so their weights always add up to 1.
    if not config.get("norm_topk_prob", False):
        raise SettingsError("HF_CKPT: config.json has norm_topk_prob false; only true is mapped")
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    is_mixed = [layer not in dense and (layer + 1) % every == 0 for layer in range(config["num_hidden_layers"])]
    group: list[object] = ["--num-experts", config.get("num_experts") or config["num_local_experts"]]
    group += ["--moe-layer-freq", f"[{','.join(str(int(mixed)) for mixed in is_mixed)}]"]
    group += ["--moe-ffn-hidden-size", config["moe_intermediate_size"]]
    group += ["--moe-router-topk", config["num_experts_per_tok"], "--moe-router-score-function", "softmax"]
    # No auxiliary loss: it would move weights that no verdict asks to move.
    group += ["--moe-router-dtype", "fp32", "--moe-aux-loss-coeff", 0, "--moe-token-drop-policy", "probs"]
    return [*group, "--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm", "--moe-permute-fusion"]


def _rope(config: Mapping[str, Any]) -> list[object]:
    """Return the rotary base, and the share of a head that rotates or Llama 3's scaling.

    Raises SettingsError for other kinds.
    """
    # Older configs keep the scaling in `rope_scaling`.
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    base = config.get("rope_theta") or rope.get("rope_theta")
    if base is None:
        raise SettingsError("HF_CKPT: config.json names no rope_theta")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind == "default":
        return ["--rotary-base", int(base), *([] if share == 1.0 else ["--rotary-percent", share])]
    if kind != "llama3" or any(rope.get(name) != value for name, value in _LLAMA3.items()):
        raise SettingsError(f"HF_CKPT: rotary embedding {rope} is not mapped; the plain one and Llama 3's are")
    return ["--rotary-base", int(base), "--use-rope-scaling", "--rope-scaling-factor", float(rope["factor"])]


HOOKS: Mapping[str, str] = {
    "--data-source-path": "openclaw_slime.rollout.LeasedBatches",
    "--rollout-function-path": "openclaw_slime.rollout.generate_rollout",
    "--custom-rollout-log-function-path": "openclaw_slime.rollout.log_nothing",
    "--custom-convert-samples-to-train-data-path": "openclaw_slime.rollout.train_data",
    "--custom-advantage-function-path": "openclaw_slime.losses.set_advantages",
    "--custom-loss-function-path": "openclaw_slime.losses.policy_loss",
}
PUSHES = ("nccl", "disk")
PRECISIONS = ("bf16", "fp8")
FP8_BLOCK = 128
"""Side of the blocks that share a scale; Transformer Engine cuts no smaller one."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of a launch script; the defaults are the public system's for Qwen3-4B on 8×H100."""

    hf_checkpoint: str
    method: str = "binary_rl"
    ref_load: str | None = None
    """Reference weights; the checkpoint itself when unset."""
    layout: Layout = field(default_factory=Layout)
    batch_size: int = 16
    learning_rate: float = 1e-5
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    kl_coef: float | None = None
    """Unset: the settings decide (`node_settings.final_settings`)."""
    max_tokens_per_gpu: int = 32768
    context_length: int = 32768
    temperature: float = 0.6
    """The server's `sampling.temperature`. The reference is measured at it, so a KL term needs the same."""
    push: str = "nccl"
    """Way of the weights to the engine: `nccl` from GPU to GPU, or `disk` by files that both sides see."""
    optimizer_on_cpu: bool = False
    card_gb: float = CARD_GB
    """Memory of a GPU that trains, for the estimate (`memory`)."""
    precision: str = "bf16"
    """Of the matrix products in training; `fp8`: in blocks, of weights that stay bfloat16."""
    has_transformer_engine: bool = True
    """False: our layer spec replaces Transformer Engine's, with fusions off."""

    def __post_init__(self) -> None:
        if self.method not in (methods := sorted(installed_methods())):
            raise SettingsError(f"method {self.method!r} is not one of {', '.join(methods)}")
        if self.push not in PUSHES:
            raise SettingsError(f"PUSH {self.push!r} is not one of {', '.join(PUSHES)}")
        if self.push == "nccl" and self.layout.is_shared:
            raise SettingsError("SHARE_GPUS needs PUSH=disk: NCCL refuses two ranks on one GPU")
        if self.batch_size % self.layout.data_parallel:
            raise SettingsError(
                f"BATCH_SIZE {self.batch_size} is no multiple of the {self.layout.data_parallel} replicas that train"
            )
        if self.kl_coef is not None and self.kl_coef < 0:
            raise SettingsError(f"KL_COEF is {self.kl_coef}; it cannot be negative")
        if not self.has_transformer_engine and self.optimizer_on_cpu:
            raise SettingsError(
                "the optimizer's state on the CPU needs Transformer Engine; keep it on the GPUs without"
            )
        if not self.has_transformer_engine and self.layout.context_parallel > 1:
            raise SettingsError("CP > 1 needs Transformer Engine: our own layer spec has no context parallelism")
        if self.precision not in PRECISIONS:
            raise SettingsError(f"TRAIN_PRECISION {self.precision!r} is not one of {', '.join(PRECISIONS)}")
        if self.precision == "fp8" and not self.has_transformer_engine:
            raise SettingsError("TRAIN_PRECISION fp8 needs Transformer Engine: it has the fp8 matrix products")


def slime_arguments(options: NodeOptions, config: Mapping[str, Any]) -> list[str]:
    """Return slime's part of the driver's argv. `config`: the checkpoint's config.json.

    The driver asks the server for the rest: the version to load, the checkpoints' folder and the engine's address.
    Raises SettingsError for an architecture that the options do not fit.
    """
    if config.get("model_type") in _NEED_TRANSFORMER_ENGINE and not options.has_transformer_engine:
        raise SettingsError(
            f"HF_CKPT: {config['model_type']} needs Transformer Engine: our own layers have no such part"
        )
    _check_shape(options, {**config, **(config.get("text_config") or {})})
    groups: list[list[object]] = [
        ["--hf-checkpoint", options.hf_checkpoint, "--ref-load", options.ref_load or options.hf_checkpoint],
        list(model_arguments(config)),
        _layout(options.layout),
        _hooks(),
        _batch(options),
        _loss(options),
        _optimizer(options),
        _memory(options),
    ]
    return [str(argument) for group in groups for argument in group]


def _check_shape(options: NodeOptions, config: Mapping[str, Any]) -> None:
    """Check that Megatron can cut the model as the layout says. Raises SettingsError in the variables' names."""
    layout = options.layout
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    cut = {
        f"{heads} attention heads": heads,
        # slime reads each rank's part of them back as whole heads.
        f"{config.get('num_key_value_heads', heads)} key and value heads": config.get("num_key_value_heads", heads),
        f"{width} units of a layer": width,
    }
    for what, count in cut.items():
        if count % layout.actor_tp:
            raise SettingsError(f"TP {layout.actor_tp} does not divide the model's {what}")
    if config["num_hidden_layers"] % layout.pipeline_parallel:
        raise SettingsError(f"PP {layout.pipeline_parallel} does not divide the {config['num_hidden_layers']} layers")
    if options.precision == "fp8":
        if config.get("model_type") != "qwen3":
            raise SettingsError(f"TRAIN_PRECISION fp8 is mapped for qwen3 alone, not for {config.get('model_type')}")
        head = config.get("head_dim") or hidden // heads
        sides = {"hidden size": hidden, "attention": heads * head // layout.actor_tp, "layer": width // layout.actor_tp}
        for what, side in sides.items():
            if side % FP8_BLOCK:
                raise SettingsError(f"TRAIN_PRECISION fp8: the {what} of a rank is {side}, no multiple of {FP8_BLOCK}")


def _layout(layout: Layout) -> list[object]:
    # slime does not see the engines' GPUs: the driver sees the actor's only.
    group: list[object] = ["--actor-num-nodes", max(1, layout.actor_nodes)]
    group += ["--actor-num-gpus-per-node", layout.actor_gpus]
    group += ["--num-gpus-per-node", layout.actor_gpus, "--rollout-num-gpus-per-engine", layout.engine_tp]
    group += ["--tensor-model-parallel-size", layout.actor_tp]
    group += ["--pipeline-model-parallel-size", layout.pipeline_parallel]
    group += ["--context-parallel-size", layout.context_parallel]
    if layout.actor_tp > 1:
        group.append("--sequence-parallel")
    return group


def _hooks() -> list[object]:
    group: list[object] = []
    for flag, path in HOOKS.items():
        group += [flag, path]
    # No dataset: batches come from the ledger, by lease, for as long as the driver runs.
    return [*group, "--disable-rollout-global-dataset", "--num-rollout", 100_000_000, "--loss-type", "custom_loss"]


def _batch(options: NodeOptions) -> list[object]:
    # Exactly global_batch_size samples a step: slime trims the rest silently, so `rollout` pads a partial batch.
    group: list[object] = ["--rollout-batch-size", options.batch_size, "--n-samples-per-prompt", 1]
    group += ["--global-batch-size", options.batch_size, "--num-steps-per-rollout", 1]
    group += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", options.max_tokens_per_gpu]
    group += ["--rollout-max-context-len", options.context_length]
    return [*group, "--rollout-temperature", options.temperature]


def _loss(options: NodeOptions) -> list[object]:
    # One step a batch: the old log-probs are this forward pass, detached, so slime's extra forward is not needed.
    group: list[object] = ["--advantage-estimator", "grpo", "--disable-rewards-normalization", "--use-rollout-logprobs"]
    # A number that is not finite makes every rank skip the step, instead of killing the first rank that sees it.
    group += ["--entropy-coef", 0.0, "--no-check-for-nan-in-loss-and-grad"]
    if options.kl_coef:
        # Loads the reference and gives `ref_log_probs`; slime's own KL term is not used by a custom loss.
        group += ["--use-kl-loss", "--kl-loss-coef", options.kl_coef, "--kl-loss-type", "low_var_kl"]
    return group


def _optimizer(options: NodeOptions) -> list[object]:
    group: list[object] = ["--optimizer", "adam", "--lr", options.learning_rate, "--lr-decay-style", "constant"]
    group += ["--weight-decay", options.weight_decay, "--adam-beta1", options.adam_beta1]
    group += ["--adam-beta2", options.adam_beta2, "--clip-grad", options.max_grad_norm]
    group += ["--lr-warmup-iters", options.warmup_steps]
    # A resumed run takes these values, not its checkpoint's: Megatron stops at a difference otherwise.
    group.append("--override-opt-param-scheduler")
    if options.optimizer_on_cpu:
        group += ["--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer"]
    return group


def _memory(options: NodeOptions) -> list[object]:
    group: list[object] = [
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        1,
    ]
    group += ["--log-probs-chunk-size", 1024, "--attention-dropout", 0.0, "--hidden-dropout", 0.0]
    group += ["--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32"]
    if options.precision == "fp8":
        # Without --fp8-param-gather: it does not go with the optimizer on the CPU, and slime's export reads bfloat16.
        group += ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
    if options.has_transformer_engine:
        return [*group, "--attention-backend", "flash"]
    group += ["--transformer-impl", "local", "--spec", "openclaw_slime.spec", "get_spec"]
    fusions = ("gradient-accumulation", "rope", "bias-swiglu", "bias-dropout", "masked-softmax")
    return [*group, *(f"--no-{fusion}-fusion" for fusion in fusions), "--no-persist-layer-norm"]

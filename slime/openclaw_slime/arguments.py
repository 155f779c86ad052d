"""Our node settings as slime's command line: one table, pure functions, no slime imported.

What differs from slime's defaults, and why, stands beside each group. The hooks named here are the whole surface of
the plugin (`HOOKS`); the contract tests check each against the pinned slime.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.errors import SettingsError
from openclaw_slime.layout import Layout
from openclaw_slime.model_shape import model_arguments

HOOKS: Mapping[str, str] = {
    "--data-source-path": "openclaw_slime.rollout.LeasedBatches",
    "--rollout-function-path": "openclaw_slime.rollout.generate_rollout",
    "--custom-rollout-log-function-path": "openclaw_slime.rollout.log_nothing",
    "--custom-convert-samples-to-train-data-path": "openclaw_slime.samples.train_data",
    "--custom-advantage-function-path": "openclaw_slime.losses.set_advantages",
    "--custom-loss-function-path": "openclaw_slime.losses.policy_loss",
}
METHODS = ("binary_rl", "opd", "combine")
PUSHES = ("nccl", "disk")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What a launch script decides; defaults are the public system's for Qwen3-4B on 8×H100."""

    hf_checkpoint: str
    method: str = "binary_rl"
    ref_load: str | None = None
    """Reference weights; the checkpoint itself when unset."""
    layout: Layout = field(default_factory=Layout)
    batch_size: int = 16
    learning_rate: float = 1e-5
    weight_decay: float = 0.1
    adam_beta2: float = 0.98
    kl_coef: float = 0.0
    max_tokens_per_gpu: int = 32768
    context_length: int = 32768
    temperature: float = 0.7
    """The server's `sampling.temperature`: the reference is measured at it, so a KL term takes no other."""
    push: str = "nccl"
    """How weights reach the engine: from GPU to GPU, or by files that both sides see."""
    optimizer_on_cpu: bool = True
    has_transformer_engine: bool = True
    """False: our layer spec replaces Transformer Engine's, and its fusions are off."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SettingsError(f"method {self.method!r} is not one of {', '.join(METHODS)}")
        if self.push not in PUSHES:
            raise SettingsError(f"PUSH {self.push!r} is not one of {', '.join(PUSHES)}")
        if self.push == "nccl" and self.layout.is_shared:
            raise SettingsError("SHARE_GPUS needs PUSH=disk: NCCL refuses two ranks on one GPU")
        if self.batch_size % self.layout.data_parallel:
            raise SettingsError(
                f"BATCH_SIZE {self.batch_size} is no multiple of the {self.layout.data_parallel} replicas that train"
            )
        if self.kl_coef < 0:
            raise SettingsError(f"KL_COEF is {self.kl_coef}; it cannot be negative")
        if not self.has_transformer_engine and self.optimizer_on_cpu:
            raise SettingsError(
                "the optimizer's state on the CPU needs Transformer Engine; keep it on the GPUs without"
            )
        if not self.has_transformer_engine and self.layout.context_parallel > 1:
            raise SettingsError("CONTEXT_PARALLEL > 1 needs Transformer Engine: our own layer spec has none")


def slime_arguments(options: NodeOptions, config: Mapping[str, Any]) -> list[str]:
    """slime's part of the driver's argv. `config`: the checkpoint's config.json. What is loaded, where checkpoints go
    and which engine gets the weights is added by the driver, which asks the server."""
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


def _layout(layout: Layout) -> list[object]:
    # The GPUs of the engines are none of slime's: the driver sees the actor's alone.
    group: list[object] = ["--actor-num-nodes", max(1, layout.actor_nodes)]
    group += ["--actor-num-gpus-per-node", layout.actor_gpus]
    group += ["--num-gpus-per-node", layout.actor_gpus, "--rollout-num-gpus-per-engine", layout.engine_tp]
    group += ["--tensor-model-parallel-size", layout.actor_tp, "--pipeline-model-parallel-size", 1]
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
    # Exactly global_batch_size samples a step: slime trims the rest in silence, so `samples` pads a partial batch.
    group: list[object] = ["--rollout-batch-size", options.batch_size, "--n-samples-per-prompt", 1]
    group += ["--global-batch-size", options.batch_size, "--num-steps-per-rollout", 1]
    group += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", options.max_tokens_per_gpu]
    group += ["--rollout-max-context-len", options.context_length]
    return [*group, "--rollout-temperature", options.temperature]


def _loss(options: NodeOptions) -> list[object]:
    # One step a batch: old = this forward, detached, so slime's extra forward is not needed (DESIGN §4).
    group: list[object] = ["--advantage-estimator", "grpo", "--disable-rewards-normalization", "--use-rollout-logprobs"]
    # A number that is not finite leaves out the step on every rank, instead of killing the first that sees it.
    group += ["--entropy-coef", 0.0, "--no-check-for-nan-in-loss-and-grad"]
    if options.kl_coef:
        # Loads the reference and gives `ref_log_probs`; slime's own KL term is not used by a custom loss.
        group += ["--use-kl-loss", "--kl-loss-coef", options.kl_coef, "--kl-loss-type", "low_var_kl"]
    return group


def _optimizer(options: NodeOptions) -> list[object]:
    group: list[object] = ["--optimizer", "adam", "--lr", options.learning_rate, "--lr-decay-style", "constant"]
    group += ["--weight-decay", options.weight_decay, "--adam-beta1", 0.9, "--adam-beta2", options.adam_beta2]
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
    if options.has_transformer_engine:
        return [*group, "--attention-backend", "flash"]
    group += ["--transformer-impl", "local", "--spec", "openclaw_slime.spec", "get_spec"]
    fusions = ("gradient-accumulation", "rope", "bias-swiglu", "bias-dropout", "masked-softmax")
    return [*group, *(f"--no-{fusion}-fusion" for fusion in fusions), "--no-persist-layer-norm"]

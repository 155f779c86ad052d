"""Pins and contracts: the versions this plugin was written against, and the code of slime that it relies on.

The README quotes the pins. slime and Megatron-LM are the user's checkouts, installed as those projects say; SGLang
comes with them. This project downloads and builds none of them.

A contract is a function that the plugin calls or replaces, or a line that it relies on. Sources are parsed, never
imported, so no GPU, Ray or Megatron is needed. A function that is missing, or cannot be called as we call it, means
that the node cannot run. Renamed parameters and a missing line may be harmless; the message says the risk.

Leaves to others: the flags that slime knows, and the keys that its lists pass on (the contract tests).
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROLLOUT = "slime/ray/rollout.py"
GROUP = "slime/ray/actor_group.py"
PLACEMENT = "slime/ray/placement_group.py"
TRACKING = "slime/observability/logging_utils.py"
ACTOR = "slime/backends/megatron_utils/actor.py"
MODEL = "slime/backends/megatron_utils/model.py"
LOSS = "slime/backends/megatron_utils/loss.py"
DATA = "slime/backends/megatron_utils/data.py"
CONTEXT_PARALLEL = "slime/backends/megatron_utils/cp_utils.py"
GROUPS = "slime/utils/distributed_utils.py"
DISK_PUSH = "slime/backends/megatron_utils/update_weight/update_weight_from_disk.py"
NCCL_PUSH = "slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py"


@dataclass(frozen=True, slots=True)
class Call:
    """A function that we call, or that slime calls in our subclass, with its arguments."""

    file: str
    name: str
    """`function`, or `Class.method`."""
    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join((*self.positional, *(f'{name}=' for name in self.keywords)))})"


@dataclass(frozen=True, slots=True)
class Line:
    """A piece of code inside a function, as `ast.unparse` writes it."""

    file: str
    name: str
    text: str
    costs: str
    """The risk if the line is missing."""


CALLS = (
    Call(PLACEMENT, "create_placement_groups", ("args",)),
    Call(PLACEMENT, "create_rollout_manager", ("args", "pg")),
    Call(PLACEMENT, "create_training_models", ("args", "pgs", "rollout_manager"), ("actor_cls",)),
    Call(TRACKING, "configure_logger"),
    Call(TRACKING, "init_tracking", ("args",)),
    Call(TRACKING, "finish_tracking", ("args",)),
    Call(GROUP, "RayTrainGroup.async_train", ("self", "rollout_id", "rollout_data_ref")),
    Call(GROUP, "RayTrainGroup.save_model", ("self", "rollout_id"), ("force_sync",)),
    Call(GROUP, "RayTrainGroup.update_weights", ("self",)),
    Call(ROLLOUT, "RolloutManager.generate", ("self", "rollout_id")),
    Call(ROLLOUT, "RolloutManager.save", ("self", "rollout_id")),
    Call(ROLLOUT, "RolloutManager.load", ("self", "rollout_id")),
    Call(ROLLOUT, "RolloutManager.dispose", ("self",)),
    Call(ACTOR, "MegatronTrainRayActor.update_weights", ("self",)),
    Call(ACTOR, "MegatronTrainRayActor.train", ("self", "rollout_id", "rollout_data_ref"), ("external_data",)),
    Call(ACTOR, "MegatronTrainRayActor.train_actor", ("self", "rollout_id", "rollout_data"), ("external_data",)),
    Call(ACTOR, "MegatronTrainRayActor.save_model", ("self", "rollout_id"), ("force_sync",)),
    Call(GROUPS, "get_gloo_group"),
    Call(CONTEXT_PARALLEL, "slice_log_prob_with_cp", ("log_prob", "total_length", "response_length")),
    Call(
        LOSS,
        "get_responses",
        ("logits",),
        ("args", "unconcat_tokens", "total_lengths", "response_lengths", "apply_temperature"),
    ),
)
LINES = (
    Line(
        LOSS,
        "compute_advantages_and_returns",
        "custom_adv_fn(args, rollout_data)",
        "credit and top-k may not reach the loss",
    ),
    Line(DATA, "DataIterator.get_next", "[vals[i] for i in indices]", "credit and top-k may not reach the loss"),
    Line(LOSS, "loss_function", "func(args, batch, logits, sum_of_sample_mean)", "our loss may not be the one"),
    Line(
        MODEL,
        "train_one_step",
        "found_inf_flag = optimizer.prepare_grads()",
        "a lease that ends in a step costs a start of the driver",
    ),
    Line(MODEL, "train_one_step", "if valid_step:", "a step that is not finite may move the weights"),
    Line(
        MODEL,
        "train_one_step",
        "opt_param_scheduler.step(increment=",
        "a step that was left out may be taken for one that was made",
    ),
    Line(
        NCCL_PUSH,
        "UpdateWeightFromDistributed.update_weights",
        "self.weight_version += 1",
        "the engine may get another version's number",
    ),
    Line(
        DISK_PUSH,
        "UpdateWeightFromDisk.update_weights",
        "self.weight_version += 1",
        "the folder may have another version's number",
    ),
    Line(
        DISK_PUSH,
        "UpdateWeightFromDisk.update_weights",
        "f'weight_v{self.weight_version:06d}'",
        "the server may look for a version in another folder",
    ),
    Line(
        GROUP,
        "RayTrainGroup.update_weights",
        "actor.update_weights.remote() for actor in self._actor_handlers",
        "a push may leave something out",
    ),
    Line(
        ACTOR,
        "MegatronTrainRayActor.save_model",
        "self.args.save_hf.format(rollout_id=rollout_id)",
        "a version's files may lie elsewhere",
    ),
    Line(ROLLOUT, "RolloutManager._get_rollout_data", "evaluation=False", "a batch may be asked for in another way"),
)


def broken(root: Path, call: Call) -> str | None:
    """Return the reason that the function cannot be called as we call it; None if it can.

    Its other parameters must have defaults.
    """
    function = _function(root / call.file, call.name)
    if function is None:
        return f"{call.file} has no {call.name}, which is called as {call}"
    given = function.args
    by_position = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    filled, left = len(call.positional), by_position[len(call.positional) :]
    required = set(by_position[filled : len(by_position) - len(given.defaults)])
    required |= {arg.arg for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None}
    known = {*left, *(argument.arg for argument in given.kwonlyargs)}
    takes = (filled <= len(by_position) or given.vararg is not None) and required <= set(call.keywords)
    if takes and (set(call.keywords) <= known or given.kwarg is not None):
        return None
    return f"{call.file}: {call.name}({ast.unparse(given)}) cannot be called as {call}"


def renamed(root: Path, call: Call) -> str | None:
    """Return a warning if our positional arguments have other names there: they may have another meaning."""
    function = _function(root / call.file, call.name)
    if function is None:
        return None
    given = function.args
    names = tuple(argument.arg for argument in (*given.posonlyargs, *given.args))[: len(call.positional)]
    if names == call.positional:
        return None
    return f"{call.file}: {call.name}({ast.unparse(given)}) is called as {call}, and may mean something else"


def gone(root: Path, line: Line) -> str | None:
    """Return the risk if the line is missing; None if it is there."""
    function = _function(root / line.file, line.name)
    if function is not None and line.text in ast.unparse(function):
        return None
    return f"{line.file}: {line.name} does not say `{line.text}`: {line.costs}"


def _function(file: Path, name: str) -> ast.FunctionDef | None:
    try:
        scope: ast.AST = ast.parse(file.read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    *owner, function = name.split(".")
    for class_name in owner:
        found = (node for node in ast.walk(scope) if isinstance(node, ast.ClassDef) and node.name == class_name)
        if (inner := next(found, None)) is None:
            return None
        scope = inner
    body = (node for node in ast.walk(scope) if isinstance(node, ast.FunctionDef) and node.name == function)
    return next(body, None)


@dataclass(frozen=True, slots=True)
class Pin:
    name: str
    version: str
    """A commit, or a release."""
    module: str
    """A module that is importable exactly if the part is installed."""  # `slime` on PyPI is another project


SLIME = Pin("slime", "624b824a", "slime.ray.rollout")
MEGATRON = Pin("Megatron-LM", "1dcf0dafa884ad52ffb243625717a3471643e087", "megatron.training")
SGLANG = Pin("sglang", "0.5.15.post1", "sglang.srt")
PINS = (SLIME, MEGATRON, SGLANG)
IMAGE = "slimerl/slime:nightly-dev-20260810a-cu129"
"""slime's own image that goes with its pin: the newest one that it names at that commit (CUDA 12)."""

PACKAGES = (
    Pin("ray", "2.60.0", "ray"),
    Pin("sglang-router", "0.3.2", "sglang_router"),
    Pin("torch", "2.11.0", "torch"),
)
"""Versions of the other packages in our runs; other versions may work."""
FILES: Mapping[str, Mapping[str, str]] = {
    SLIME.name: {
        "slime/ray/rollout.py": "a54dea5e8e3c",
        "slime/ray/actor_group.py": "779d845723fa",
        "slime/ray/placement_group.py": "3c5064102ea3",
        "slime/observability/logging_utils.py": "30ba0ccefdee",
        "slime/utils/arguments.py": "434f78ffce78",
        "slime/utils/distributed_utils.py": "ee95a4775ece",
        "slime/backends/megatron_utils/actor.py": "fba3c8d92c61",
        "slime/backends/megatron_utils/model.py": "f413ab3d486a",
        "slime/backends/megatron_utils/loss.py": "f3a0f85db2d5",
        "slime/backends/megatron_utils/data.py": "581ed42c5bd2",
        "slime/backends/megatron_utils/initialize.py": "3c858fb92571",
        "slime/backends/megatron_utils/cp_utils.py": "01cc3c6cfa35",
        "slime/backends/megatron_utils/update_weight/update_weight_from_disk.py": "431c86f1afb4",
        "slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py": "8f1c0132395f",
        "slime/backends/sglang_utils/sglang_engine.py": "bca020ccc5f5",
        "slime/backends/sglang_utils/external.py": "06d3e561bed3",
    },
    MEGATRON.name: {
        "megatron/core/transformer/attention.py": "378fea76d259",
        "megatron/core/transformer/transformer_layer.py": "3f589c79eba9",
        "megatron/core/transformer/transformer_block.py": "f1cf3732e97d",
        "megatron/core/transformer/mlp.py": "0a51b7ee9af3",
        "megatron/core/tensor_parallel/layers.py": "4f2732329e62",
        "megatron/core/models/gpt/gpt_model.py": "d944b42a6a17",
        "megatron/core/optimizer/__init__.py": "87c984430926",
        "megatron/core/optimizer/distrib_optimizer.py": "6b6c413743c2",
        "megatron/training/arguments.py": "3b1bf4a7fa58",
    },
}
"""Files that we call or replace parts of: path in the checkout → the first digits of its sha256 at the pin."""
IMAGE_FILES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    MEGATRON.name: {
        "megatron/core/transformer/transformer_layer.py": ("a34dff0032a2", "fbc0b229479f"),
        "megatron/core/models/gpt/gpt_model.py": ("efb64f337606",),
        "megatron/core/optimizer/distrib_optimizer.py": ("42c802e2cb5b",),
        "megatron/training/arguments.py": ("7c250b12e881",),
    },
}
"""The same of the files that slime's image patches, after each of its patches of Megatron."""


def is_pinned(pin: Pin, name: str, digest: str) -> bool:
    """Return True if a file with this sha256 is the pin's, or the one that slime's image makes of it."""
    known = (FILES[pin.name][name], *IMAGE_FILES.get(pin.name, {}).get(name, ()))
    return digest.startswith(known)

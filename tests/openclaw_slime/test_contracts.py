"""Code of slime and Megatron-LM that the plugin relies on, read in their own sources.

The checkouts are the user's: `SLIME_ROOT`, `MEGATRON_ROOT`, else `slime` and `Megatron-LM` beside this project.
Without them these tests are skipped by name. Sources are parsed, not imported: no GPU, Ray or Megatron is needed.
"""

import ast
import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from openclaw_rl.trainer_protocol import SampleBody, Tip
from openclaw_rl.types import WeightKind
from openclaw_slime.arguments import HOOKS, QWEN3_4B, NodeOptions, slime_arguments
from openclaw_slime.checkpoints import Checkpoints
from openclaw_slime.contracts import CALLS, FILES, LINES, MEGATRON, SLIME, broken, gone, renamed
from openclaw_slime.driver import engine_arguments
from openclaw_slime.layout import SLIMES_LENGTH, Layout
from openclaw_slime.rollout import extras_of, train_data_of

BESIDE = Path(__file__).parents[3]


def checkout(variable: str, name: str, proof: str) -> Path:
    root = Path(os.environ.get(variable, BESIDE / name))
    if not (root / proof).is_file():
        pytest.skip(f"no checkout of {name}: set {variable}")
    return root


@pytest.fixture
def slime() -> Path:
    return checkout("SLIME_ROOT", "slime", "slime/ray/rollout.py")


@pytest.fixture
def megatron() -> Path:
    return checkout("MEGATRON_ROOT", "Megatron-LM", "megatron/training/arguments.py")


def string_lists(source: Path, function: str) -> list[set[str]]:
    """Every list or set of string literals inside a function."""
    tree = ast.parse(source.read_text())
    (body,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
    return [
        {e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)}
        for node in ast.walk(body)
        if isinstance(node, ast.List | ast.Set)
    ]


def flags_of(text: str) -> set[str]:
    return set(re.findall(r"""["'](--[a-z0-9][a-z0-9-]*)["']""", text))


@pytest.mark.parametrize("transformer_engine", [True, False])
def test_every_argument_is_known(slime, megatron, transformer_engine):
    options = NodeOptions(
        "CK",
        kl_coef=0.1,
        layout=Layout(actor_tp=2),
        has_transformer_engine=transformer_engine,
        optimizer_on_cpu=transformer_engine,
        precision="fp8" if transformer_engine else "bf16",
    )
    ours = {word for word in slime_arguments(options, QWEN3_4B) if word.startswith("--")}
    if transformer_engine:
        router = {"num_experts": 8, "moe_intermediate_size": 768, "num_experts_per_tok": 2, "norm_topk_prob": True}
        for change in ({"model_type": "qwen3_moe", **router}, {"model_type": "qwen3_5", "partial_rotary_factor": 0.25}):
            words = slime_arguments(replace(options, precision="bf16"), {**QWEN3_4B, **change})
            ours |= {word for word in words if word.startswith("--")}
    checkpoints, tip = Checkpoints(Path("D")), Tip(weight_version=0, kind=WeightKind.FULL, base_hash="b", folder=None)
    ours |= {"--ckpt-step", *(word for word in engine_arguments(["u"], Path("D")) if word[:2] == "--")}
    ours |= {word for word in checkpoints.save_arguments() + checkpoints.load_arguments(tip, "CK") if word[:2] == "--"}
    sources = [slime / "slime/utils/arguments.py", *(slime / "slime/backends").rglob("arguments.py")]
    known = set().union(*(flags_of(path.read_text()) for path in sources))
    text = "".join(
        path.read_text()
        for path in (megatron / "megatron").rglob("*.py")
        if path.name.endswith(("arguments.py", "config.py"))
    )
    known |= flags_of(text)
    # Megatron makes flags of its config dataclasses' fields; `--no-x` and `--disable-x` switch a field x off.
    fields = set(re.findall(r"^    ([a-z][a-z0-9_]+): ", text, re.MULTILINE))
    known |= {"--" + name.replace("_", "-") for name in fields}
    unknown = {flag for flag in ours - known if not flag.startswith("--sglang-")}
    assert not unknown


def test_a_layout_that_we_let_through_is_one_that_megatron_takes(slime, megatron):
    """Their own words for what `layout` and `arguments` check before anything loads."""
    theirs = (megatron / "megatron/core/transformer/transformer_config.py").read_text()
    theirs += (megatron / "megatron/training/arguments.py").read_text()
    for words in (
        "self.num_attention_heads % self.tensor_model_parallel_size != 0",
        "num_layers % args.transformer_pipeline_model_parallel_size == 0",
        "args.seq_length % (args.context_parallel_size * 2) == 0",
        "assert args.use_precision_aware_optimizer",
    ):
        assert words in theirs, words
    own = (slime / "slime/backends/megatron_utils/arguments.py").read_text()
    assert f"args.seq_length = {SLIMES_LENGTH}" in own
    assert "args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node" in own


def test_every_hook_has_its_flag(slime):
    assert set(HOOKS) <= flags_of((slime / "slime/utils/arguments.py").read_text())


def test_every_key_of_the_training_data_reaches_the_ranks(slime):
    """slime hands on what its list names and drops the rest without a word."""
    body = SampleBody(
        sample_id="s",
        prompt_ids=[1],
        response_ids=[2],
        loss_mask=[True],
        rollout_log_probs=[-1.0],
        versions=[(0, 1)],
        temperature=1.0,
    )
    keys = set(train_data_of(extras_of([body], [[1.0]], 1)))
    passed = set().union(*string_lists(slime / "slime/ray/rollout.py", "_split_train_data_by_dp"))
    assert keys <= passed


def test_the_loss_gets_what_the_advantages_hook_leaves(slime):
    (wanted,) = (
        keys
        for keys in string_lists(slime / "slime/backends/megatron_utils/model.py", "train_one_step")
        if "loss_masks" in keys
    )
    assert {"advantages", "returns", "values", "rollout_log_probs", "rollout_mask_sums", "ref_log_probs"} <= wanted


def test_the_log_does_not_sum_our_texts(slime):
    (ignored,) = (
        keys
        for keys in string_lists(slime / "slime/observability/train_metric_utils.py", "log_rollout_data")
        if "tokens" in keys
    )
    assert "source_names" in ignored


def test_the_pinned_files_are_those_of_the_checkouts(slime, megatron):
    for pin, root in ((SLIME, slime), (MEGATRON, megatron)):
        for name, digest in FILES[pin.name].items():
            assert hashlib.sha256((root / name).read_bytes()).hexdigest().startswith(digest), name


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_what_we_call_and_override_is_as_we_call_it(slime, call):
    assert broken(slime, call) is None
    assert renamed(slime, call) is None


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.text)
def test_the_lines_that_we_lean_on(slime, line):
    assert gone(slime, line) is None

"""The node's launch scripts, as a user calls them. The snapshots are what `--dry-run` prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openclaw_rl.engines.sglang.launch import TAKES_IDS

ROOT = Path(__file__).parents[2]
SNAPSHOTS = ROOT / "tests/data/slime_dry_run"
SCRIPTS = {
    "openclaw_rl": "openclaw-rl/run_qwen3_4b_openclaw_rl.sh",
    "openclaw_opd": "openclaw-opd/run_qwen3_4b_openclaw_opd.sh",
    "openclaw_opd_topk": "openclaw-opd/run_qwen3_4b_openclaw_opd_topk.sh",
    "openclaw_combine": "openclaw-combine/run_qwen3_4b_openclaw_combine.sh",
}


def launch(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, **variables}
    return subprocess.run(
        [ROOT / script, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_dry_run_prints_the_layout_and_every_argv(name):
    done = launch(SCRIPTS[name], "--dry-run", HF_CKPT="CHECKPOINT")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (SNAPSHOTS / f"{name}.txt").read_text()


def test_the_layout_follows_the_variables():
    done = launch(
        SCRIPTS["openclaw_combine"], "--dry-run", HF_CKPT="C", ACTOR_GPUS="2", ROLLOUT_GPUS="4", TP="1", GPU_GB="141"
    )
    assert "GPU 0–1   actor    Megatron, TP 1, CP 1, PP 1, DP 2" in done.stdout
    assert """'engine.args=["--tp", "4"]'""" in done.stdout
    assert "CUDA_VISIBLE_DEVICES=2,3,4,5" in done.stdout


def test_several_policy_engines_are_a_pool_whose_weights_go_by_disk():
    variables = {"HF_CKPT": "C", "ROLLOUT_GPUS": "2", "ROLLOUT_ENGINES": "2"}
    done = launch(SCRIPTS["openclaw_combine"], "--dry-run", **variables)
    assert done.returncode == 0, done.stderr
    assert "GPU 4–5   rollout  SGLang, 2 engines of TP 1" in done.stdout
    assert "--set engine.replicas=2" in done.stdout
    assert "engine.args" not in done.stdout
    driver = done.stdout.partition("\ndriver\n")[2]
    assert "--push disk" in driver
    assert "--rollout-num-gpus-per-engine 1" in driver
    assert "note: 2 policy engines under slime's driver have never run on cards here" in done.stdout
    by_nccl = launch(SCRIPTS["openclaw_combine"], "--dry-run", **variables, PUSH="nccl")
    assert "--push nccl" in by_nccl.stdout
    larger = launch(
        SCRIPTS["openclaw_combine"],
        "--dry-run",
        **{**variables, "ROLLOUT_GPUS": "4", "PRM_GPUS": "0"},
        PRM_URL="http://j/v1",
    )
    assert "SGLang, 2 engines of TP 2" in larger.stdout
    assert """'engine.args=["--tp", "2"]'""" in larger.stdout


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"ROLLOUT_GPUS": "3", "ROLLOUT_ENGINES": "2", "PRM_GPUS": "1"}, "ROLLOUT_GPUS 3 must be ROLLOUT_ENGINES 2 × "),
        ({"ROLLOUT_ENGINES": "2", "ENGINE_TP": "2"}, "ROLLOUT_GPUS 2 must be ROLLOUT_ENGINES 2 × ENGINE_TP 2: each"),
        ({"ROLLOUT_ENGINES": "0"}, "ROLLOUT_ENGINES is 0; at least 1 is needed"),
    ],
)
def test_engines_that_the_gpus_cannot_be_divided_among_are_refused(variables, says):
    done = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {says}")


def test_a_wrong_layout_is_one_line_and_nothing_starts():
    done = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", ACTOR_GPUS="6")
    assert done.returncode == 2
    assert done.stderr == "error: ACTOR_GPUS 6 + ROLLOUT_GPUS 2 + PRM_GPUS 2 = 10, but NUM_GPUS is 8\n"
    assert done.stdout == ""


def test_other_nodes_train_on_a_cluster_by_its_address():
    variables = {"HF_CKPT": "C", "ACTOR_NODES": "2", "ACTOR_GPUS": "8", "ROLLOUT_GPUS": "4", "PRM_GPUS": "4"}
    refused = launch(SCRIPTS["openclaw_rl"], "--dry-run", **variables)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: ACTOR_NODES 2 needs RAY_ADDRESS: the cluster those nodes belong to\n"
    done = launch(SCRIPTS["openclaw_rl"], "--dry-run", **variables, RAY_ADDRESS="10.0.0.1:6379")
    assert "2 other × 8 GPUs   actor    Megatron, TP 8, CP 1, PP 1, DP 2" in done.stdout
    driver = done.stdout.partition("\ndriver\n")[2]
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3 " in driver  # it uses none, but Megatron's arguments are read where one is
    assert "MASTER_ADDR" not in driver  # the loopback of a cluster that is only here
    for words in ("--ray-address 10.0.0.1:6379", "--actor-num-nodes 2", "--actor-num-gpus-per-node 8"):
        assert words in driver


def test_without_prm_gpus_a_judge_elsewhere_is_needed():
    refused = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", PRM_GPUS="0")
    assert refused.returncode == 2
    assert "PRM_URL is not set" in refused.stderr
    given = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", PRM_GPUS="0", PRM_URL="http://j/v1")
    assert "judge.url=http://j/v1" in given.stdout
    assert "sglang.launch_server" not in given.stdout
    rules = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", PRM_GPUS="0", JUDGE="rules")
    assert "judge.kind=rules" in rules.stdout


def test_a_top_k_is_for_methods_that_distil():
    refused = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", TOP_K="20")
    assert refused.returncode == 2, refused.stdout
    assert refused.stderr == "error: TOP_K is for methods that distil: binary_rl has no top-k\n"


def test_more_words_reach_the_prms_engine():
    done = launch(
        SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", PRM_ARGS="--attention-backend triton --log-level 'very low'"
    )
    prm = done.stdout.partition("\nprm\n")[2].partition("\nserver\n")[0]
    assert "--attention-backend triton" in prm
    assert "--log-level 'very low'" in prm
    assert "--prefill-max-requests" not in prm


@pytest.mark.parametrize(("top_k", "is_set"), [("20", True), ("0", False)])
def test_engines_that_score_given_ids_take_one_prompt_a_batch(top_k: str, is_set: bool) -> None:
    """SGLang ends of a batch where one prompt names ids and another, a judge's or a chat's, does not."""
    more = "--prefill-max-requests 7"
    told = ("--dry-run", "--set", "method.guidance=1")
    done = launch(SCRIPTS["openclaw_combine"], *told, HF_CKPT="C", TOP_K=top_k, PRM_ARGS=more)
    prm = done.stdout.partition("\nprm\n")[2].partition("\nserver\n")[0]
    words = [word for word in prm.split() if word != "\\"]
    assert (tuple(words[-3:]) == TAKES_IDS) is is_set, done.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--log-level 'half open", 'PRM_ARGS "--log-level \'half open": No closing quotation'),
        ("--host 0.0.0.0", "PRM_ARGS --host: it is set here"),
        ("--tp 1 --port=9", "PRM_ARGS --port=9: it is set here"),
    ],
)
def test_words_that_cannot_be_given_to_the_prm_are_refused(given, says):
    done = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", PRM_ARGS=given)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_the_optimizers_state_is_on_the_gpus_where_it_fits_and_by_a_variable():
    shown = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C")
    assert "optimizer 12.1 (on the GPU): 26 of 80 GB" in shown.stdout
    assert "offload" not in shown.stdout
    moved = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", OPTIMIZER="cpu")
    assert "optimizer 12.1 (on the CPU): 14 of" in moved.stdout
    assert "--optimizer-cpu-offload" in moved.stdout
    assert "note: the optimizer's state on the CPU has never run on a card here" in moved.stdout
    small = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", GPU_GB="24")
    assert (small.returncode, small.stdout) == (2, ""), "no start takes the untried way by itself"
    for words in (
        "optimizer 12.1 (on the GPU): 26 of 24 GB; at most 85% of it",
        "OPTIMIZER=gpu",
        "OPTIMIZER=cpu is untried",
    ):
        assert words in small.stderr
    tiny = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", GPU_GB="12", OPTIMIZER="gpu")
    assert "note: an actor GPU may run out of memory: the estimate is past 85% of GPU_GB" in tiny.stdout


def test_without_transformer_engine_the_optimizer_stays_on_the_gpus():
    without = launch(SCRIPTS["openclaw_rl"], "--dry-run", "--no-transformer-engine", HF_CKPT="C")
    assert "openclaw_slime.spec" in without.stdout
    assert "offload" not in without.stdout
    assert "precision-aware" not in without.stdout
    refused = launch(SCRIPTS["openclaw_rl"], "--dry-run", "--no-transformer-engine", HF_CKPT="C", OPTIMIZER="cpu")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: the optimizer's state on the CPU needs Transformer Engine")


def test_context_and_pipeline_parallelism_by_variables():
    done = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", CP="2", PP="2")
    assert "Megatron, TP 1, CP 2, PP 2, DP 1" in done.stdout  # TP is what they leave
    for words in ("--context-parallel-size 2", "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 1"):
        assert words in done.stdout
    assert "trainer.max_tokens=65536" in done.stdout  # a sample may fill the budget of both GPUs
    topk = launch(SCRIPTS["openclaw_opd_topk"], "--dry-run", HF_CKPT="C", CP="2")
    assert topk.stderr == "error: TOP_K (method.top_k) needs CP=1: a top-k is not cut over ranks\n"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"ENGINE_PRECISION": "fp8"}, "ENGINE_PRECISION fp8: the engine serves bfloat16. slime quantises"),
        ({"ENGINE_PRECISION": "int4"}, "int4 also needs a call of slime's patched SGLang"),
        ({"PP": "5", "ACTOR_GPUS": "5", "NUM_GPUS": "9"}, "PP 5 does not divide the 36 layers"),
        ({"CP": "two"}, "argument --actor-cp: invalid int value: 'two'"),
        ({"CP": "0"}, "error: CP is 0; at least 1 is needed"),
        ({"CP": "2", "ACTOR_GPUS": "3", "TP": "1"}, "ACTOR_GPUS 3 is no multiple of TP × CP × PP = 1 × 2 × 1"),
    ],
)
def test_what_slime_cannot_do_is_refused_before_anything_starts(variables, says):
    done = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_training_in_fp8_by_two_variables_because_it_is_untried():
    fp8 = {"HF_CKPT": "C", "TRAIN_PRECISION": "fp8"}
    alone = launch(SCRIPTS["openclaw_rl"], "--dry-run", **fp8)
    assert (alone.returncode, alone.stdout) == (2, "")
    assert alone.stderr == (
        "error: TRAIN_PRECISION fp8 has never run on a card here: TRY_FP8=1 starts it all the same\n"
    )
    done = launch(SCRIPTS["openclaw_rl"], "--dry-run", **fp8, TRY_FP8="1")
    assert "note: training in fp8 has never run on a card here; watch `fresh_abs_log_ratio`" in done.stdout
    assert "--fp8-format e4m3" in done.stdout
    assert "--fp8-recipe blockwise" in done.stdout
    refused = launch(SCRIPTS["openclaw_rl"], "--dry-run", "--no-transformer-engine", **fp8, TRY_FP8="1")
    assert refused.stderr == ("error: TRAIN_PRECISION fp8 needs Transformer Engine: it has the fp8 matrix products\n")


def test_the_checkpoint_is_needed():
    done = launch(SCRIPTS["openclaw_rl"], "--dry-run")
    assert done.returncode == 2
    assert "HF_CKPT is needed" in done.stderr


def test_a_checkpoint_that_is_no_folder_is_refused_before_anything_starts(tmp_path):
    done = launch(SCRIPTS["openclaw_rl"], HF_CKPT="Qwen/Qwen3-8B", SAVE_CKPT=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: HF_CKPT Qwen/Qwen3-8B: it is no folder here" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_secret_is_printed():
    done = launch(SCRIPTS["openclaw_rl"], "--dry-run", HF_CKPT="C", SGLANG_API_KEY="sk-very-secret")
    assert "sk-very-secret" not in done.stdout + done.stderr


@pytest.mark.parametrize("script", [*SCRIPTS.values(), "slime/launch.sh"])
def test_scripts_kill_nothing_and_name_no_place_of_their_own(script):
    text = (ROOT / script).read_text()
    assert not any(word in text for word in ("pkill", "killall", "kill -9", "set -x", "/home/", "/data"))

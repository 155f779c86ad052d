"""Arguments of the node's command (`launch`): the launch scripts set them from their variables.

A help text names the variable where its name differs from the argument's.
"""

import argparse

from openclaw_rl.settings import installed_methods
from openclaw_slime.arguments import PRECISIONS, PUSHES
from openclaw_slime.memory import CARD_GB
from openclaw_slime.node_settings import DATA_DIR, DRIFT_KL

PRM_PORT = 30001


def launch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m openclaw_slime.launch",
        description="Train on a node of GPUs: Megatron through slime, SGLang engines, our server in front.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--method", required=True, choices=sorted(installed_methods()), help="what is learned from")
    add("--hf-checkpoint", required=True, help="folder of the policy in Hugging Face format (HF_CKPT)")
    add("--ref-load", help="reference weights; the checkpoint when unset (REF_LOAD)")
    add("--data-dir", default=DATA_DIR, help="ledger, versions and checkpoints; resumed from here (SAVE_CKPT)")
    add("--checkpoint-every", type=int, default=20, help="updates between two checkpoints")
    add("--checkpoint-minutes", type=float, default=30.0, help="of an update that is on no disk, at most")
    add("--prm-checkpoint", help="the judge's model; the policy's checkpoint when unset (PRM_MODEL_PATH)")
    for name, default, what in (
        ("num", 8, "GPUs of the node"),
        ("actor", 4, "GPUs that train, of each node that does"),
        ("rollout", 2, "GPUs that serve the policy"),
        ("prm", 2, "GPUs of the judge; 0: one elsewhere, --prm-url"),
    ):
        add(f"--{name}-gpus", type=int, default=default, help=what)
    add("--actor-nodes", type=int, default=0, help="other nodes that train, while all of this one serves")
    add("--actor-tp", type=int, help="tensor-parallel size of Megatron; unset: what CP and PP leave (TP)")
    add("--actor-cp", type=int, default=1, help="context-parallel size: GPUs that share one sequence (CP)")
    add("--actor-pp", type=int, default=1, help="pipeline-parallel size: stages of layers (PP)")
    add("--rollout-engines", type=int, default=1, help="policy engines that share --rollout-gpus, as a pool")
    add("--engine-tp", type=int, help="GPUs of one policy engine; unset: --rollout-gpus divided among the engines")
    add("--prm-tp", type=int, default=2, help="GPUs of one PRM engine")
    add("--batch-size", type=int, default=16, help="samples of one update")
    add("--learning-rate", type=float, default=1e-5)
    drift = f"weight of the KL to the reference; unset: 0, or {DRIFT_KL} where the policy is its own teacher (KL_COEF)"
    add("--kl-coef", type=float, help=drift)
    add("--temperature", type=float, default=0.6, help="of chats that name none (TEMPERATURE)")
    add("--max-new-tokens", type=int, default=8192, help="of a chat that names no limit (MAX_NEW_TOKENS)")
    add("--max-tokens-per-gpu", type=int, default=32768, help="token budget of one micro-batch")
    add("--mem-fraction-static", type=float, default=0.85, help="share of a serving GPU for weights and KV cache")
    add("--context-length", type=int, default=32768)
    add("--host", default="127.0.0.1", help="anything but loopback needs a chat key (SGLANG_API_KEY)")
    add("--port", type=int, default=30000)
    add("--served-model-name")
    add("--tool-call-parser", default="qwen25")
    add("--reasoning-parser", default="qwen3")
    add("--judge", choices=("llm", "rules"), default="llm", help="rules: no model judges; hints are users' own words")
    add("--prm-url", help="base URL of an OpenAI-compatible judge elsewhere (PRM_URL)")
    add("--prm-port", type=int, help=f"of the PRM that is started here; unset: {PRM_PORT}, or a free one (PRM_PORT)")
    add("--prm-args", default="", help="more words for the PRM's SGLang, quoted as for a shell (PRM_ARGS)")
    add("--prm-votes", type=int, default=3, help="judge samples per turn (PRM_M)")
    add("--prm-temperature", type=float, default=0.6)
    add("--prm-max-new-tokens", type=int, default=4096)
    add("--top-k", type=int, default=0, help="distil over the teacher's top k; 0: over the sampled tokens")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="one more setting of the server")
    add("--push", choices=PUSHES, help="how weights reach the engines; unset: nccl to one, disk to several (PUSH)")
    add("--share-gpus", action="store_true", help="every part begins at GPU 0, for a check on one card")
    add("--prm-beside-engine", action="store_true", help="both engines begin at one GPU, for a check on two cards")
    add(
        "--optimizer",
        choices=("auto", "gpu", "cpu"),
        default="auto",
        help="place of the optimizer's state; auto: the GPUs, or no start if their memory cannot hold it (OPTIMIZER)",
    )
    add("--optimizer-on-gpu", action="store_const", const="gpu", dest="optimizer", help="the same as --optimizer gpu")
    add("--gpu-gb", type=float, default=CARD_GB, help="memory of a GPU that trains, for that estimate (GPU_GB)")
    add("--train-precision", choices=PRECISIONS, default="bf16", help="of Megatron's matrix products (TRAIN_PRECISION)")
    add("--try-fp8", action="store_true", help="let --train-precision fp8 start, which never ran on a card (TRY_FP8=1)")
    add(
        "--engine-precision", choices=("bf16", "fp8", "int4"), default="bf16", help="of the policy's engine; bf16 alone"
    )
    add(
        "--no-transformer-engine",
        action="store_true",
        help="for hosts without it: our own layer spec, and the optimizer on the GPU",
    )
    add("--ray-address", help="a running Ray cluster; a local Ray when unset")
    add("--server-python", help="interpreter of the server's environment; this one when unset")
    add("--engine-python", help="interpreter of SGLang's environment; this one when unset")
    add("--dry-run", action="store_true", help="print the layout and every argv, start nothing")
    return parser

#!/usr/bin/env bash
# Tool-call agents, Qwen3-4B, full weights: problems with a Python tool, outcome alone. Variables: node.sh.
#   HF_CKPT=/models/Qwen3-4B TASKS=/data/dapo.jsonl EVAL_TASKS=/data/aime.jsonl scripts/agents/toolcall-rl_qwen3-4b.sh [--dry-run]
set -euo pipefail
NAME=toolcall-rl_qwen3-4b ENVIRONMENT=python_tool AGENTS_KIND=tools
GROUPS_PER_STEP=${GROUPS_PER_STEP:-32} GROUP_SIZE=${GROUP_SIZE:-8} STEPS=${STEPS:-16} KL_COEF=${KL_COEF:-0.01}
PROCESS_WEIGHT=0 JUDGE=rules PRM_M=1
ACTOR_GPUS=${ACTOR_GPUS:-4} ROLLOUT_GPUS=${ROLLOUT_GPUS:-4} PRM_GPUS=${PRM_GPUS:-0}
. "$(dirname "${BASH_SOURCE[0]}")/node.sh"
both "$@"

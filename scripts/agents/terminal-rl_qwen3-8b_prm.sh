#!/usr/bin/env bash
# Terminal agents, Qwen3-8B, full weights: terminus-2 on Harbor tasks, outcome and a judge of each step. Variables: node.sh.
#   HF_CKPT=/models/Qwen3-8B TASKS=/data/tasks scripts/agents/terminal-rl_qwen3-8b_prm.sh [--dry-run]
set -euo pipefail
NAME=terminal-rl_qwen3-8b_prm ENVIRONMENT=harbor
GROUPS_PER_STEP=${GROUPS_PER_STEP:-16} GROUP_SIZE=${GROUP_SIZE:-8} STEPS=${STEPS:-10} KL_COEF=${KL_COEF:-0.01}
PROCESS_WEIGHT=1 JUDGE=llm PRM_M=${PRM_M:-1}
ACTOR_GPUS=${ACTOR_GPUS:-4} ROLLOUT_GPUS=${ROLLOUT_GPUS:-2} PRM_GPUS=${PRM_GPUS:-2}
. "$(dirname "${BASH_SOURCE[0]}")/node.sh"
both "$@"

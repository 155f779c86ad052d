#!/usr/bin/env bash
# Terminal agents, Qwen3-8B, full weights: terminus-2 on Harbor tasks, outcome alone. Variables: node.sh.
#   HF_CKPT=/models/Qwen3-8B TASKS=/data/tasks scripts/agents/terminal-rl_qwen3-8b.sh [--dry-run]
set -euo pipefail
NAME=terminal-rl_qwen3-8b ENVIRONMENT=harbor
GROUPS_PER_STEP=${GROUPS_PER_STEP:-16} GROUP_SIZE=${GROUP_SIZE:-8} STEPS=${STEPS:-10} KL_COEF=${KL_COEF:-0.01}
PROCESS_WEIGHT=0 JUDGE=rules PRM_M=1
ACTOR_GPUS=${ACTOR_GPUS:-4} ROLLOUT_GPUS=${ROLLOUT_GPUS:-4} PRM_GPUS=${PRM_GPUS:-0}
. "$(dirname "${BASH_SOURCE[0]}")/node.sh"
both "$@"

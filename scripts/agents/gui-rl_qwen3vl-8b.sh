#!/usr/bin/env bash
# GUI agents, Qwen3-VL-8B, full weights: MiniWoB with pages as text, outcome and a judge of each step. Variables: node.sh.
# No screenshots: the server takes no images yet. MiniWoB brings its tasks.
#   HF_CKPT=/models/Qwen3-VL-8B-Thinking scripts/agents/gui-rl_qwen3vl-8b.sh [--dry-run]
set -euo pipefail
NAME=gui-rl_qwen3vl-8b ENVIRONMENT=miniwob AGENTS_KIND=tools NEEDS_TASKS=0
GROUPS_PER_STEP=${GROUPS_PER_STEP:-8} GROUP_SIZE=${GROUP_SIZE:-8} STEPS=${STEPS:-30} KL_COEF=${KL_COEF:-0.01}
PROCESS_WEIGHT=1 JUDGE=llm PRM_M=${PRM_M:-3}
ACTOR_GPUS=${ACTOR_GPUS:-4} ROLLOUT_GPUS=${ROLLOUT_GPUS:-2} PRM_GPUS=${PRM_GPUS:-2}
# Contexts of one browser at once.
CONCURRENCY=${CONCURRENCY:-16}
. "$(dirname "${BASH_SOURCE[0]}")/node.sh"
both "$@"

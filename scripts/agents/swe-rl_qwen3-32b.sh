#!/usr/bin/env bash
# SWE agents, Qwen3-32B, full weights: mini-swe-agent on Harbor-format repositories, a judge of each step. Variables: node.sh.
#   HF_CKPT=/models/Qwen3-32B TASKS=/data/swe scripts/agents/swe-rl_qwen3-32b.sh [--dry-run]
set -euo pipefail
NAME=swe-rl_qwen3-32b ENVIRONMENT=mini_swe
GROUPS_PER_STEP=${GROUPS_PER_STEP:-8} GROUP_SIZE=${GROUP_SIZE:-4} STEPS=${STEPS:-20} KL_COEF=${KL_COEF:-0}
PROCESS_WEIGHT=1 JUDGE=llm PRM_M=${PRM_M:-3}
ACTOR_GPUS=${ACTOR_GPUS:-4} ROLLOUT_GPUS=${ROLLOUT_GPUS:-2} PRM_GPUS=${PRM_GPUS:-2}
export OPTIMIZER=${OPTIMIZER:-cpu} # the moments of 32B do not fit beside the weights
. "$(dirname "${BASH_SOURCE[0]}")/node.sh"
both "$@"

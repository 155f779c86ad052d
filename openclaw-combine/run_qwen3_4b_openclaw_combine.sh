#!/usr/bin/env bash
# Binary RL and distillation combined on a node of 8 GPUs: 4 Megatron, 2 SGLang, 2 PRM. Variables: see slime/launch.sh.
#   HF_CKPT=/models/Qwen3-4B-Thinking-2507 openclaw-combine/run_qwen3_4b_openclaw_combine.sh [--dry-run]
set -euo pipefail
METHOD=combine
: "${PRM_M:=1}" "${PRM_MAX_NEW_TOKENS:=8192}" "${MEM_FRACTION_STATIC:=0.8}"
. "$(dirname "${BASH_SOURCE[0]}")/../slime/launch.sh"

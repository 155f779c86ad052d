#!/usr/bin/env bash
# Binary RL on a node of 8 GPUs: 4 Megatron, 2 SGLang, 2 PRM. Variables: see slime/launch.sh.
#   HF_CKPT=/models/Qwen3-4B-Thinking-2507 openclaw-rl/run_qwen3_4b_openclaw_rl.sh [--dry-run]
set -euo pipefail
METHOD=binary_rl
. "$(dirname "${BASH_SOURCE[0]}")/../slime/launch.sh"

#!/usr/bin/env bash
# Binary RL with a LoRA on one GPU, beside SGLang. Variables: see scripts/lora.sh.
#   HF_CKPT=Qwen/Qwen3-4B-Thinking-2507 ENGINE_PYTHON=~/sglang/bin/python openclaw-rl/run_qwen3_4b_openclaw_rl_lora.sh [--dry-run]
set -euo pipefail
METHOD=binary_rl
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/lora.sh"

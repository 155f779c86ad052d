#!/usr/bin/env bash
# Binary RL and distillation combined with a LoRA on one GPU, beside SGLang. Variables: see scripts/lora.sh.
#   HF_CKPT=Qwen/Qwen3-4B-Thinking-2507 ENGINE_PYTHON=~/sglang/bin/python openclaw-combine/run_qwen3_4b_openclaw_combine_lora.sh [--dry-run]
set -euo pipefail
METHOD=combine
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/lora.sh"

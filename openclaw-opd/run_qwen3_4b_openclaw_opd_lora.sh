#!/usr/bin/env bash
# Distillation with a LoRA on one GPU, beside SGLang. Variables: see scripts/lora.sh.
#   HF_CKPT=Qwen/Qwen3-4B-Thinking-2507 ENGINE_PYTHON=~/sglang/bin/python openclaw-opd/run_qwen3_4b_openclaw_opd_lora.sh [--dry-run]
set -euo pipefail
METHOD=opd
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/lora.sh"

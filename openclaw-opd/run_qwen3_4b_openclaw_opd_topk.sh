#!/usr/bin/env bash
# Distillation over the teacher's top 50 tokens on a node of 8 GPUs: 4 Megatron, 2 SGLang, 2 PRM. Variables: see slime/launch.sh.
#   HF_CKPT=/models/Qwen3-4B-Thinking-2507 openclaw-opd/run_qwen3_4b_openclaw_opd_topk.sh [--dry-run]
set -euo pipefail
METHOD=opd
: "${TOP_K:=50}" "${BATCH_SIZE:=4}" "${LR:=1e-6}" "${PRM_MAX_NEW_TOKENS:=8192}"
. "$(dirname "${BASH_SOURCE[0]}")/../slime/launch.sh"

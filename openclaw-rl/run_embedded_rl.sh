#!/usr/bin/env bash
# Binary RL on the embedded default: the bundled 135M model on the CPU, the rules judge, and the defaults that taught this
# model by verdicts alone (README, "What it teaches"; openclaw_rl/settings/tuned.py).
#   openclaw-rl/run_embedded_rl.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/embedded.sh"
serve_embedded --method binary_rl -- "$@"

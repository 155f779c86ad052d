#!/usr/bin/env bash
# Reward and distillation at once on the embedded default: the bundled 135M model on the CPU, the rules judge, the user's
# own correction as the hint.
# The other settings are the ones that were measured to teach and to stay on topic (README, "What it teaches").
#   openclaw-combine/run_embedded_combine.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/embedded.sh"
serve_embedded --method combine --set method.hint_source=verbatim --set method.teacher=base \
  --set trainer.learning_rate=3e-4 --set method.binary_weight=0.3 --set method.baseline=ema -- "$@"

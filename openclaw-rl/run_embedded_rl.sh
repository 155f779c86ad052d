#!/usr/bin/env bash
# Binary RL on the embedded default: the bundled 135M model on the CPU, the rules judge.
#   openclaw-rl/run_embedded_rl.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/embedded.sh"
# What taught the bundled model by verdicts alone (README, "What it teaches"): nothing is credited while all verdicts are
# alike, a high rate, and a weight on staying near the base, without which that rate loses the topic.
serve_embedded --method binary_rl --set method.baseline=others --set trainer.learning_rate=1e-3 --set trainer.kl_coef=0.1 \
  -- "$@"

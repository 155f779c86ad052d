#!/usr/bin/env bash
# On-policy distillation on the embedded default: the bundled 135M model on the CPU. The user's own correction is the
# hint, because a model of this size cannot be asked for one.
# The other settings are the ones that were measured to teach and to stay on topic (README, "What it teaches").
#   openclaw-opd/run_embedded_opd.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/embedded.sh"
serve_embedded --method opd --set method.hint_source=verbatim --set method.teacher=base \
  --set trainer.learning_rate=3e-4 -- "$@"

#!/usr/bin/env bash
# On-policy distillation on the embedded default: the bundled 135M model on the CPU, with the settings' own defaults,
# which are the ones that were measured to teach and to stay on topic (README, "What it teaches"). The user's own
# correction is the hint: a model of this size cannot be asked for one.
#   openclaw-opd/run_embedded_opd.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/embedded.sh"
serve_embedded --method opd -- "$@"

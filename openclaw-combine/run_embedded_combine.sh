#!/usr/bin/env bash
# Reward and distillation at once on the embedded default: the bundled 135M model on the CPU, the rules judge, the user's
# own correction as the hint, and the settings' own defaults, which are the ones that were measured to teach and to stay
# on topic (../openclaw-opd/README.md, "What it teaches").
#   openclaw-combine/run_embedded_combine.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/embedded.sh"
serve_embedded --method combine -- "$@"

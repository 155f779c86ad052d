#!/usr/bin/env bash
# The swe miniature on two cores: two-line functions with a bug, written anew. Variables: mini.sh.
#   scripts/agents/swe_mini.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
NAME=swe_mini ENVIRONMENT=${ENVIRONMENT:-swe_mini} MAX_TOKENS=${MAX_TOKENS:-64}
. "$(dirname "${BASH_SOURCE[0]}")/mini.sh"
both "$@"

#!/usr/bin/env bash
# The tool-call miniature on two cores: one of four tools, one argument, one line of JSON. Variables: mini.sh.
#   scripts/agents/toolcall_mini.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
NAME=toolcall_mini ENVIRONMENT=${ENVIRONMENT:-toolcall_mini} MAX_TOKENS=${MAX_TOKENS:-32}
. "$(dirname "${BASH_SOURCE[0]}")/mini.sh"
both "$@"

#!/usr/bin/env bash
# The terminal miniature on two cores: shell commands from requests in plain words. Variables: mini.sh.
#   scripts/agents/terminal_mini.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
NAME=terminal_mini ENVIRONMENT=${ENVIRONMENT:-terminal_mini} MAX_TOKENS=${MAX_TOKENS:-24}
. "$(dirname "${BASH_SOURCE[0]}")/mini.sh"
both "$@"

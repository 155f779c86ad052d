#!/usr/bin/env bash
# The GUI miniature on two cores: click, type or check by name on a page that is shown as text. Variables: mini.sh.
#   scripts/agents/gui_mini.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
NAME=gui_mini ENVIRONMENT=${ENVIRONMENT:-gui_mini} MAX_TOKENS=${MAX_TOKENS:-24}
. "$(dirname "${BASH_SOURCE[0]}")/mini.sh"
both "$@"

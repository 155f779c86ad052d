#!/usr/bin/env bash
# Installs what is needed into .venv (the first time) and runs the server on the embedded default: the bundled 135M model, on the CPU.
#   scripts/serve.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/embedded.sh"
serve_embedded -- "$@"

#!/usr/bin/env bash
# Runs the server on the embedded default: the bundled 135M model, on the CPU. The first time it installs into .venv.
#   scripts/serve.sh [--dry-run] [any flag of `openclaw-rl serve`]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/embedded.sh"
serve_embedded -- "$@"

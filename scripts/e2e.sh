#!/usr/bin/env bash
# Runs an end-to-end check with the real server, engine and trainer, or lists them.
#   scripts/e2e.sh              the names
#   scripts/e2e.sh NAME --help  what it checks, its flags
#   scripts/e2e.sh NAME FOLDER [FLAG …]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/package.sh"
run_from e2e "$@"

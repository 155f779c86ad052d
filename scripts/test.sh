#!/usr/bin/env bash
# Installs what the tests need into .venv (the first time) and runs what CI runs: linters, types, import contracts, tests.
#   scripts/test.sh            everything
#   scripts/test.sh ARGS …     pytest alone, with these arguments
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
ensure_venv local,dev
cd "$ROOT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ $# -gt 0 ]; then exec python -m pytest "$@"; fi
ruff format --check .
ruff check .
mypy
lint-imports
# Two workers suit two cores: much of the suite waits (kills, paced streams); a file stays with one worker, and so do its models.
exec python -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile

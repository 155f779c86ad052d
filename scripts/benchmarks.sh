#!/usr/bin/env bash
# Runs a benchmark, or lists them.
#   scripts/benchmarks.sh              the names
#   scripts/benchmarks.sh NAME --help  its question, its flags
#   scripts/benchmarks.sh NAME [FLAG …]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/package.sh"
run_from benchmarks "$@"

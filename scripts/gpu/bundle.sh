#!/usr/bin/env bash
# Packs the packages of the GPU checks for a host without internet; `--help` says what it writes.
#   scripts/gpu/bundle.sh FOLDER [--slime CHECKOUT --megatron CHECKOUT]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$ROOT/scripts/package.sh"
run_from gpu bundle "$@"

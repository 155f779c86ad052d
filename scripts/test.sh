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
# The chaos run mostly waits: it goes on beside the rest. Two workers suit two cores, as much of the suite waits too
# (kills, paced streams); a file stays with one worker, and so do its models.
CHAOS=tests/integration/test_chaos.py
beside=$(mktemp)
set -m # a process group of its own: Ctrl-C does not reach it, and it can be ended whole
python -m pytest "$CHAOS" >"$beside" 2>&1 &
chaos=$!
set +m

end_with_us() { # asked to, then made to; when it is over, nothing
  rm -f "$beside"
  [ -n "$chaos" ] || return
  kill -INT -- "-$chaos" 2>/dev/null || return
  for _ in $(seq 100); do
    kill -0 -- "-$chaos" 2>/dev/null || return
    sleep 0.2
  done
  kill -KILL -- "-$chaos" 2>/dev/null
}
trap end_with_us EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

rest=0
python -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile --ignore "$CHAOS" || rest=$?
# pytest was interrupted (2) or killed: nobody waits for the chaos run's word any more.
if [ "$rest" -eq 2 ] || [ "$rest" -gt 128 ]; then exit "$rest"; fi
wait "$chaos" || rest=$?
chaos=
tail -n 40 "$beside"
exit "$rest"

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

declare -A beside=() # jobs that run beside the tests: process group → file of its output
start() {
  local output
  output=$(mktemp)
  set -m # a process group of its own: Ctrl-C does not reach it, and the trap below ends it whole
  "$@" >"$output" 2>&1 &
  set +m
  started=$!
  beside[$started]=$output
}

end_with_us() { # SIGINT first, then SIGKILL
  local group
  for group in "${!beside[@]}"; do
    rm -f "${beside[$group]}"
    kill -INT -- "-$group" 2>/dev/null || unset "beside[$group]"
  done
  for _ in $(seq 100); do
    for group in "${!beside[@]}"; do
      kill -0 -- "-$group" 2>/dev/null || unset "beside[$group]"
    done
    [ "${#beside[@]}" -gt 0 ] || return 0
    sleep 0.2
  done
  for group in "${!beside[@]}"; do kill -KILL -- "-$group" 2>/dev/null || true; done
}
trap end_with_us EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

finish() { # waits for a job, shows the end of what it wrote; its exit code
  local code=0
  wait "$1" || code=$?
  tail -n 40 "${beside[$1]}"
  rm -f "${beside[$1]}"
  unset "beside[$1]"
  return "$code"
}

look() { # every check runs, whether or not one before it failed
  local code=0
  mypy || code=$?
  lint-imports || code=$?
  return "$code"
}

# The chaos run mostly waits, and the checks need one core for a minute. Two workers suit two cores, as much of the suite
# waits too (kills, paced streams); a file stays with one worker, and so do its models (tests/conftest.py).
CHAOS=tests/integration/test_chaos.py
start look
checks=$started
start python -m pytest "$CHAOS"
chaos=$started
code=0
python -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile --ignore "$CHAOS" || code=$?
# pytest was interrupted (2) or killed: the results of the other jobs do not matter any more.
if [ "$code" -eq 2 ] || [ "$code" -gt 128 ]; then exit "$code"; fi
finish "$checks" || code=$?
finish "$chaos" || code=$?
exit "$code"

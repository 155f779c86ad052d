#!/usr/bin/env bash
# Installs what the tests need into .venv (the first time) and runs what CI runs: linters, types, import contracts, the
# figures of the house, tests.
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

outputs=$(mktemp -d)
groups="" # process groups of the jobs that run beside the tests
start() { # start NAME COMMAND …: its output goes to a file of that name
  local output=$outputs/$1
  shift
  set -m # a process group of its own: Ctrl-C does not reach it, and the trap below ends it whole
  "$@" >"$output" 2>&1 &
  set +m
  groups="$groups $!"
}

end_with_us() { # SIGINT first, then SIGKILL
  local group left="$groups"
  rm -rf "$outputs"
  for group in $left; do kill -INT -- "-$group" 2>/dev/null || true; done
  for _ in $(seq 100); do
    groups=$left left=""
    for group in $groups; do
      if kill -0 -- "-$group" 2>/dev/null; then left="$left $group"; fi
    done
    [ -n "$left" ] || return 0
    sleep 0.2
  done
  for group in $left; do kill -KILL -- "-$group" 2>/dev/null || true; done
}
trap end_with_us EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

finish() { # finish NAME GROUP: waits for a job and shows the end of its output; its exit code
  local code=0
  wait "$2" || code=$?
  groups=${groups/ $2/}
  tail -n 100 "$outputs/$1"
  return "$code"
}

look() { # every check runs, whether or not one before it failed
  local code=0
  mypy || code=$?
  lint-imports || code=$?
  python scripts/house.py || code=$?
  return "$code"
}

# The chaos run mostly waits, and the checks need one core for a minute. Five workers suit two cores: with three, a third
# of the cores' time stayed unused, because half of the suite waits (kills, paced streams, starts). A file stays with one
# worker, and so do its models (tests/conftest.py).
CHAOS=tests/integration/test_chaos.py
start checks look
checks=$!
# In a fresh clone five workers would each compile what they import, and rewrite the asserts of every test. One process
# does it for all, on the core that the checks leave.
if [ ! -d tests/__pycache__ ]; then python -m pytest --collect-only --quiet >"$outputs/collected" || true; fi
start chaos python -m pytest "$CHAOS"
chaos=$!
code=0
python -m pytest -n "${TEST_WORKERS:-5}" --dist loadfile --ignore "$CHAOS" || code=$?
# pytest was interrupted (2) or killed: the results of the other jobs do not matter any more.
if [ "$code" -eq 2 ] || [ "$code" -gt 128 ]; then exit "$code"; fi
finish checks "$checks" || code=$?
finish chaos "$chaos" || code=$?
exit "$code"

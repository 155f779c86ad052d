# Sourced by the scripts beside it: a server and a runner, together. A script sets RUN, fills the arrays `server` and
# `runner`, and defines `plan`, which prints the plan of the run as TOML. Then it calls `both "$@"`.
#
#   --dry-run    prints the plan and both command lines, and starts nothing
#   all other arguments go to the server, behind the script's own
#
# The server's log is RUN/server.log. When the runner ends, or on Ctrl-C, the server is stopped, too.
export PYTHONSAFEPATH=1 # the folder slime/ of this repository is not the library of that name
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PORT=${PORT:-30000}
URL=http://127.0.0.1:$PORT

both() {
  local argument dry_run="" pid
  for argument in "$@"; do
    if [ "$argument" = "--dry-run" ]; then dry_run=1; else server+=("$argument"); fi
  done
  if [ -n "$dry_run" ]; then
    plan
    printf '%q ' "${server[@]}" && echo
    printf '%q ' "${runner[@]}" && echo
    return
  fi
  if declare -F prepare >/dev/null; then prepare; fi # what must be there before the start
  mkdir -p "$RUN"
  plan >"$RUN/plan.toml"
  "${server[@]}" >>"$RUN/server.log" 2>&1 &
  pid=$!
  # shellcheck disable=SC2064
  trap "kill $pid 2>/dev/null; wait $pid 2>/dev/null || true" EXIT
  until curl -fsS "$URL/healthz" >/dev/null 2>&1; do
    if ! kill -0 "$pid" 2>/dev/null; then
      echo "error: the server ended; $RUN/server.log says why" >&2
      tail -n 5 "$RUN/server.log" >&2
      return 1
    fi
    sleep 1
  done
  "${runner[@]}"
}

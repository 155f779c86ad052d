# Sourced by the methods' run_embedded_*.sh: serves the embedded default with a method's settings.
#   serve_embedded FLAG… -- "$@"    of "$@", --dry-run prints the command line; all else goes to `openclaw-rl serve`
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

serve_embedded() {
  local settings=() argv=() dry_run=""
  while [ "$1" != "--" ]; do settings+=("$1") && shift; done
  shift
  for argument in "$@"; do
    if [ "$argument" = "--dry-run" ]; then dry_run=1; else argv+=("$argument"); fi
  done
  set -- openclaw-rl serve "${settings[@]}" ${argv[@]+"${argv[@]}"} # what the user says comes last and wins
  if [ -n "$dry_run" ]; then
    printf '%s\n' "$*"
    return
  fi
  ensure_venv local
  exec "$@"
}

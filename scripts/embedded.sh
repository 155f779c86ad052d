# Sourced by serve.sh and the methods' run_embedded_*.sh: serves the embedded default with a method's settings.
#   serve_embedded [FLAG…] -- "$@"    of "$@", --dry-run prints the command line; all else goes to `openclaw-rl serve`
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

serve_embedded() {
  local argv=() dry_run=""
  set -- openclaw-rl serve "$@"
  while [ "$1" != "--" ]; do argv+=("$1") && shift; done
  shift
  for argument in "$@"; do # what the user says comes last and wins
    if [ "$argument" = "--dry-run" ]; then dry_run=1; else argv+=("$argument"); fi
  done
  if [ -n "$dry_run" ]; then
    printf '%s\n' "${argv[*]}"
    return
  fi
  ensure_venv local
  exec "${argv[@]}"
}

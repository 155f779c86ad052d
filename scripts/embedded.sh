# Sourced by serve.sh and the methods' run_embedded_*.sh: serves the embedded default with a method's settings.
#   serve_embedded [FLAG…] -- "$@"    --dry-run in "$@" prints the command line; all other words go to `openclaw-rl serve`
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

serve_embedded() {
  local argv=() dry_run=""
  set -- openclaw-rl serve "$@"
  while [ "$1" != "--" ]; do argv+=("$1") && shift; done
  shift
  for argument in "$@"; do # the user's flags come last and win
    if [ "$argument" = "--dry-run" ]; then dry_run=1; else argv+=("$argument"); fi
  done
  if [ -n "$dry_run" ]; then
    printf '%s\n' "${argv[*]}"
    return
  fi
  ensure_venv local
  exec "${argv[@]}"
}

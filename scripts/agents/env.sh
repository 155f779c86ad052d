#!/usr/bin/env bash
# Makes an interpreter of the environments' packages, beside our client side without torch. Their pins exclude each other
# and the server's, so each kind has one of its own, with Python 3.12:
#   harbor   Harbor and mini-swe-agent
#   tools    BFCL, math-verify, MiniWoB with Playwright, verifiers
#   browsergym  MiniWoB by BrowserGym, which pins an older Playwright
#   scripts/agents/env.sh [--dry-run] [harbor|tools|browsergym] [FOLDER]
# Default: harbor, in .venv-agents of the checkout; the others in .venv-agents-KIND. PYTHON names an interpreter.
# The plan of a run then names it: python = ".venv-agents/bin/python".
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CLIENT=(httpx h11 orjson pydantic structlog typer pyyaml)
dry_run="" kind=harbor
if [ "${1:-}" = "--dry-run" ]; then dry_run=1 && shift; fi
case "${1:-}" in harbor | tools | browsergym) kind=$1 && shift ;; esac
folder=$ROOT/.venv-agents
[ $kind = harbor ] || folder=$folder-$kind
folder=${1:-$folder}

packages=() alone=()
case $kind in
harbor) packages=(harbor==0.26.0 mini-swe-agent==2.4.6) ;;
tools)
  packages=(verifiers==0.4.0 uv math-verify==0.9.0 "playwright>=1.55")
  # Without what they ask for: their data and pages are used, not their models and drivers.
  alone=(bfcl-eval==2026.3.23 miniwob==1.1.0)
  ;;
browsergym)
  packages=(browsergym-core==0.14.3 browsergym-miniwob==0.14.3) # as in the extra of pyproject.toml
  alone=(miniwob==1.1.0)
  ;;
esac

if [ -n "$dry_run" ]; then
  echo "${PYTHON:-python3.12} -m venv $folder"
  echo "$folder/bin/python -m pip install ${packages[*]} ${CLIENT[*]}"
  echo "$folder/bin/python -m pip install --no-deps --editable $ROOT${alone[*]:+ ${alone[*]}}"
  exit
fi
for python in ${PYTHON:-} python3.13 python3.12 ""; do
  if [ -n "$python" ] && command -v "$python" >/dev/null && "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))'; then
    break
  fi
done
if [ -z "$python" ]; then
  echo "error: Python 3.12 or newer is needed; PYTHON=/path/to/python names one" >&2
  exit 2
fi
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" "${packages[@]}" "${CLIENT[@]}"
"${pip[@]}" --no-deps --editable "$ROOT" "${alone[@]}"
echo "$folder/bin/python"

#!/usr/bin/env bash
# Makes the interpreter of the environments' packages: Harbor and mini-swe-agent, beside our client side without torch.
# Harbor needs Python 3.12 and pins what the server pins otherwise, so it is an environment of its own.
#   scripts/agents/env.sh [--dry-run] [FOLDER]    default: .venv-agents in the checkout. PYTHON names an interpreter.
# The plan of a run then names it: python = ".venv-agents/bin/python".
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
HARBOR="harbor==0.26.0" MINI_SWE_AGENT="mini-swe-agent==2.4.6"
CLIENT=(httpx h11 orjson pydantic structlog typer pyyaml)
dry_run=""
if [ "${1:-}" = "--dry-run" ]; then dry_run=1 && shift; fi
folder=${1:-$ROOT/.venv-agents}

if [ -n "$dry_run" ]; then
  echo "${PYTHON:-python3.12} -m venv $folder"
  echo "$folder/bin/python -m pip install $HARBOR $MINI_SWE_AGENT ${CLIENT[*]}"
  echo "$folder/bin/python -m pip install --no-deps --editable $ROOT"
  exit
fi
for python in ${PYTHON:-} python3.13 python3.12 ""; do
  if [ -n "$python" ] && command -v "$python" >/dev/null && "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))'; then
    break
  fi
done
if [ -z "$python" ]; then
  echo "error: Python 3.12 or newer is needed for Harbor; PYTHON=/path/to/python names one" >&2
  exit 2
fi
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" "$HARBOR" "$MINI_SWE_AGENT" "${CLIENT[@]}"
"${pip[@]}" --no-deps --editable "$ROOT"
echo "$folder/bin/python"

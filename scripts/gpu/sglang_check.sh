#!/usr/bin/env bash
# Checks the server on a real SGLang, on a GPU host without internet.
#
#   BUNDLE=folder [WORK=folder] [OUT=$WORK/out] scripts/gpu/sglang_check.sh STAGE …
#
# BUNDLE holds packed site folders: site.tar.xz and fi.tar.xz (SGLang's environment), ours.tar.xz (the server's),
# tok.tar.xz (a tokenizer and config.json for a random-weight model), maybe jit.tgz (a kernel cache of an earlier run).
# Both environments lie on top of the host's python3, which has torch, triton and the common scientific packages.
# What is unpacked stays in WORK, and so does a started engine: later calls need only their own stages. The stages are
# those of sglang_check.py; each has its time limit, writes its figures to OUT/<stage>.json, and a failed one does not
# stop the others.
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
WORK=${WORK:-${XDG_CACHE_HOME:-$HOME/.cache}/openclaw-rl-check}
OUT=${OUT:-$WORK/out}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$WORK" "$OUT"

unpack() { # ARCHIVE FOLDER
  [ -e "$2/.unpacked-$(basename "$1")" ] && return # by an earlier call; later ones need not bring BUNDLE
  mkdir -p "$2" && tar -xf "$1" -C "$2" && touch "$2/.unpacked-$(basename "$1")"
}

environment() { # FOLDER PATH … : an interpreter that finds the paths, in this order, then the host's packages
  local folder=$1 base
  shift
  if [ ! -x "$folder/bin/python" ]; then
    python3 -m venv --without-pip "$folder" || {
      base=$(python3 -c 'import sys; print(sys._base_executable)')
      mkdir -p "$folder/bin" "$folder/lib/python$VERSION/site-packages"
      ln -s "$base" "$folder/bin/python"
      echo "home = $(dirname "$base")" >"$folder/pyvenv.cfg"
    }
  fi
  printf '%s\n' "$@" "$HOST_SITE" >"$folder/lib/python$VERSION/site-packages/check.pth"
}

VERSION=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
HOST_SITE=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
if [ "${ENGINE:-sglang}" = sglang ]; then
  started=$SECONDS
  unpack "$BUNDLE/ours.tar.xz" "$WORK/ours-site" &
  unpack "$BUNDLE/fi.tar.xz" "$WORK/flashinfer-site" &
  unpack "$BUNDLE/tok.tar.xz" "$WORK/tokenizer" &
  if [ -e "$BUNDLE/jit.tgz" ]; then unpack "$BUNDLE/jit.tgz" "$HOME" & fi
  unpack "$BUNDLE/site.tar.xz" "$WORK/sglang-site"
  wait
  environment "$WORK/sglang" "$WORK/sglang-site" "$WORK/flashinfer-site"
  environment "$WORK/ours" "$WORK/ours-site" "$ROOT/openclaw-rl" "$ROOT/openclaw-opd" "$ROOT/openclaw-combine" "$ROOT/slime"
  "$WORK/ours/bin/python" "$ROOT/scripts/gpu/entry_points.py" "$ROOT" "$WORK/ours-site"
  echo "unpacked in $((SECONDS - started)) s"
  PYTHON=$WORK/ours/bin/python
else
  PYTHON=$(command -v python)
fi
exec "$PYTHON" "$ROOT/scripts/gpu/sglang_check.py" --work "$WORK" --out "$OUT" --engine "${ENGINE:-sglang}" "$@"

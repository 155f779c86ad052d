#!/usr/bin/env bash
# Prepares a rehearsal of a GPU check on a machine without GPUs: the same command lines, with `--tiny` added.
#
#   WORK=folder scripts/gpu/rehearse.sh        after a first stage of sglang_check.sh or node_check.sh made WORK
#
# The host's packages must be installed (python3 with torch), as on the GPU host. In WORK, SGLang's server and slime's
# driver get stand-ins (stand_ins/): the same arguments, processes, files and answers, without kernels. All other parts
# are real. WORK/<environment>/bin/python.real is the interpreter that was there before.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${WORK:?names the folder of a check}"

echo "$ROOT/scripts/gpu/stand_ins" >"$(echo "$WORK"/ours/lib/python*/site-packages)/stand_ins.pth"
for environment in sglang slime; do
  python=$WORK/$environment/bin/python
  [ -x "$python" ] || continue
  [ -e "$python.real" ] || mv "$python" "$python.real"
  cat >"$python" <<EOF
#!/usr/bin/env bash
# stand-ins for the commands that need a GPU; all others go to python.real
words=() found=
for word in "\$@"; do
  case \$word in
    sglang.launch_server) found=1 ;;
    openclaw_slime.driver) found=1 word=toy_driver ;;
  esac
  words+=("\$word")
done
[ -n "\$found" ] && exec "$WORK/ours/bin/python" "\${words[@]}"
exec -a "\$0" "$python.real" "\$@" # child processes find the stand-ins too
EOF
  chmod +x "$python"
done
mkdir -p "$WORK/bin"
cat >"$WORK/bin/nvidia-smi" <<'EOF'
#!/bin/sh
# four cards to count; no other query is answered
[ "$1" = -L ] || exit 9
for n in 0 1 2 3; do echo "GPU $n: a stand-in"; done
EOF
chmod +x "$WORK/bin/nvidia-smi"
echo "stand-ins are in $WORK"

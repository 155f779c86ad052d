#!/usr/bin/env bash
# Makes a rehearsal of a GPU check possible on a machine without GPUs: the very command lines, with `--tiny` added.
#
#   WORK=folder scripts/gpu/rehearse.sh        after a first stage of sglang_check.sh or node_check.sh made WORK
#
# The host's packages must be there (python3 with torch), as on the GPU host. In WORK, SGLang's server and slime's
# driver get stand-ins (stand_ins/): the same arguments, processes, files and answers; no kernels. Everything else is
# the real thing. WORK/<environment>/bin/python.real is the interpreter that was there.
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
# stand-ins for what needs a GPU; everything else goes to the interpreter beside
words=() found=
for word in "\$@"; do
  case \$word in
    sglang.launch_server) found=1 ;;
    openclaw_slime.driver) found=1 word=toy_driver ;;
  esac
  words+=("\$word")
done
[ -n "\$found" ] && exec "$WORK/ours/bin/python" "\${words[@]}"
exec -a "\$0" "$python.real" "\$@" # what it starts finds the stand-ins too
EOF
  chmod +x "$python"
done
mkdir -p "$WORK/bin"
cat >"$WORK/bin/nvidia-smi" <<'EOF'
#!/bin/sh
# cards to be counted, about which nothing is known
[ "$1" = -L ] || exit 9
for n in 0 1 2 3; do echo "GPU $n: a stand-in"; done
EOF
chmod +x "$WORK/bin/nvidia-smi"
echo "stand-ins are in $WORK"

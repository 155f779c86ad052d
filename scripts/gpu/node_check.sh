#!/usr/bin/env bash
# Checks the node on one, two or four GPUs without internet: our plugin in the real slime, Megatron, SGLang and Ray.
#
#   BUNDLE=folder[:folder] [WORK=folder] [OUT=$WORK/out] scripts/gpu/node_check.sh STAGE …
#
# bundle.sh wrote the folders: site2.tar.xz (Ray, sglang-router and small packages), src.tar.xz (the checkouts `slime` and
# `megatron_lm`), maybe more.tar.xz (pydantic, where SGLang's is not there yet), ours.tar.xz (the server's),
# site.tar.xz and fi.tar.xz (SGLang's), tok.tar.xz (a tokenizer), maybe jit.tgz (a kernel cache of an earlier run).
# Unpacked archives stay in WORK: a later call may bring the rest (environment.sh). `--help` lists the stages. Each has
# its time limit, writes its figures to OUT/<stage>.json, and does not stop the others if it fails.
#
# Two GPUs, about 10 minutes, in one call or more (each may bring a part of the packages):
#   node_check.sh checkpoint=60
#   node_check.sh --budget-s 540 tp=120+ engine=120 binary=230 combine=230 opd=120 recorded=30 weights=30 ledger=10
#   node_check.sh --budget-s 300 engine=120 engine_kill=240 ledger=10
# One GPU: the same with --gpus 1 and without tp. Four (tensor parallelism 2, and a judge with a card of its own):
#   node_check.sh --gpus 4 --budget-s 560 --streams 32 prm=150+ tp=120+ engine=120 binary=230 combine=230 recorded=30 weights=30 ledger=10
# A launch script itself (no other process of the check may run), with the 4B's shape on four GPUs, the 0.6B's on one:
#   node_check.sh --gpus 4 stop=30 script=540
#   node_check.sh --gpus 1 stop=30 script=400
# The same script while nobody chats: corrections are practised, taught by the judge's SGLang
#   node_check.sh --gpus 1 stop=30 practice=400
# The same script while one process after the other is killed, about 10 minutes, on one GPU:
#   node_check.sh --gpus 1 --streams 16 kills=570
#   node_check.sh --gpus 1 --streams 16 kills=320 --kills engine
# The same on two GPUs, weights by NCCL, both engines on the second card: about 20 minutes, in one process of its own
# session (setsid) over several calls, or in three calls of their own
#   node_check.sh --gpus 2 --streams 16 kills=1300
#   node_check.sh --gpus 2 --streams 16 kills=560 --kills driver head
# Two policy engines under the launch script, one of which is killed: on two GPUs by disk (the trainer, the judge and one
# engine share the first card), on four by NCCL or, with --push disk, by disk. Two calls: the first compiles the kernels
#   node_check.sh --gpus 2 --engines 2 --streams 16 checkpoint=60 script=450
#   node_check.sh --gpus 2 --engines 2 --streams 16 kills=580 --kills engine driver
#   node_check.sh --gpus 4 --engines 2 --streams 16 checkpoint=60 script=500
#   node_check.sh --gpus 4 --engines 2 --streams 16 kills=580 --kills engine driver
# A first start of SGLang compiles kernels for 90 to 150 s. Without jit.tgz, add that to a time above, or run `engine=240`
# and `stop=30` before: it is spent once a host.
# A rehearsal without GPUs: rehearse.sh.
#
# slime asserts NumPy 1. The copy of slime in WORK loses that line, so that a host with NumPy 2 can run it.
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
case " $* " in *" --help "* | *" -h "*)
  PATH=$ROOT/.venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONPATH=$ROOT/scripts exec python3 -m gpu.node_check --help ;;
esac
WORK=${WORK:-${XDG_CACHE_HOME:-$HOME/.cache}/openclaw-rl-node-check}
OUT=${OUT:-$WORK/out}
. "$ROOT/scripts/gpu/environment.sh"

started=$SECONDS
unpack src.tar.xz "$WORK/src" &
unpack site2.tar.xz "$WORK/ray-site" &
unpack more.tar.xz "$WORK/more-site" &
common_environments
sed -i '/assert np.__version__.startswith("1\.")/d' "$WORK/src/slime/slime/backends/megatron_utils/initialize.py"
environment "$WORK/slime" "${OURS[@]}" "$WORK/src/slime" "$WORK/src/megatron_lm" "$WORK/ray-site" "$WORK/sglang-site" \
  "$WORK/flashinfer-site" "$WORK/more-site"
if [ ! -e "$WORK/.compiled-${BUNDLE##*/}" ]; then # otherwise every first import takes three seconds more
  python3 -m compileall -q -j 0 "$WORK"/*-site "$WORK/src" >/dev/null 2>&1
  touch "$WORK/.compiled-${BUNDLE##*/}"
fi
echo "unpacked in $((SECONDS - started)) s"
exec "$WORK/ours/bin/python" -m gpu.node_check --work "$WORK" --out "$OUT" "$@"

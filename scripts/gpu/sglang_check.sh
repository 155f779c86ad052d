#!/usr/bin/env bash
# Checks the server on a real SGLang, on a GPU host without internet.
#
#   BUNDLE=folder[:folder …] [WORK=folder] [OUT=$WORK/out] scripts/gpu/sglang_check.sh STAGE …
#
# BUNDLE names the folders that bundle.sh wrote: site.tar.xz and fi.tar.xz (SGLang's environment), ours.tar.xz (the
# server's), tok.tar.xz (a tokenizer and config.json for a random-weight model), the bundled model in parts, and maybe
# jit.tgz (a kernel cache of an earlier run).
# Both environments extend the host's python3, which has torch, triton and the common scientific packages. Unpacked
# archives stay in WORK, and a started engine goes on: later calls need only their own stages. `--help` lists the stages.
# Each has its time limit, writes its figures to OUT/<stage>.json, and does not stop the others if it fails.
# ENGINE=embedded checks the embedded engine with the active Python. A rehearsal without a GPU: rehearse.sh.
#
# One GPU, about 6 minutes, in one call or several: the engine alone and full weights under load, then the 0.6B shape
#   sglang_check.sh random=60 engine=100 conformance=150 logprobs=100 stop=20
#   sglang_check.sh --streams 64 --full-swaps 7 random=60 engine=100 overhead=90 full=110 stop=20
#   sglang_check.sh --streams 64 --load-s 35 --swaps 10 qwen3_06b=60 engine=120 latency=80 attached=140 jit=20 stop=20
#   sglang_check.sh --streams 32 random=60 child=330
# Users with an adapter each, which the local trainer trains in turn: 5 to 7 minutes beside those of --minutes, so in a
# process of its own session (setsid), over two calls or more
#   sglang_check.sh --users 32 --minutes 10 --places 34 random=60 users=1100
# The same with fewer places than users that chat at once: first tokens wait for a place
#   sglang_check.sh --users 32 --minutes 4 --places 8 random=60 users=700
# A pool of two engines, on two cards: about 6 minutes. A first start of SGLang compiles kernels for 90 to 150 s: without
# jit.tgz a call before spends them, and takes the model that the pool finds again
#   sglang_check.sh random=60 engine=240 stop=30
#   sglang_check.sh --streams 32 --full-swaps 4 pool=560
# Practice with the guided teacher, about 5 minutes: on random weights, or on the bundled model, which learns its wish
#   sglang_check.sh random=60 practice_opd=150 practice_combine=150
#   sglang_check.sh --gguf FILE --dtype float16 gguf=60 practice_opd=150 practice_combine=150
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
case " $* " in *" --help "* | *" -h "*)
  PATH=$ROOT/.venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONPATH=$ROOT/scripts exec python3 -m gpu.sglang_check --help ;;
esac
WORK=${WORK:-${XDG_CACHE_HOME:-$HOME/.cache}/openclaw-rl-check}
OUT=${OUT:-$WORK/out}
. "$ROOT/scripts/gpu/environment.sh"

if [ "${ENGINE:-sglang}" = sglang ]; then
  started=$SECONDS
  common_environments
  echo "unpacked in $((SECONDS - started)) s"
  PYTHON=$WORK/ours/bin/python
else
  PYTHON=$(command -v python)
  export PYTHONPATH=$ROOT/scripts${PYTHONPATH:+:$PYTHONPATH} # an installed checkout has it; others do not
fi
exec "$PYTHON" -m gpu.sglang_check --work "$WORK" --out "$OUT" --engine "${ENGINE:-sglang}" "$@"

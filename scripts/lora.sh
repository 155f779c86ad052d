# Sourced by the methods' run_qwen3_4b_*_lora.sh: SGLang serves on one GPU and a LoRA trains beside it. A script sets
# METHOD and its defaults, then sources this file with its own arguments, which go to `openclaw-rl serve`. `--dry-run`
# prints the command line.
#
#   HF_CKPT        the model: a folder or a Hugging Face name (needed)   SAVE_CKPT   ledger and versions (default: ~/.openclaw-rl)
#   PYTHON         interpreter of our environment (default: python3)     ENGINE_PYTHON   of SGLang's; the same one when unset
#   HOST=127.0.0.1 PORT=30000 SERVED_MODEL_NAME SGLANG_API_KEY           TOOL_CALL_PARSER=qwen25 REASONING_PARSER=qwen3
#   CONTEXT_LENGTH=32768 MEM_FRACTION_STATIC=0.5 (SGLang's share)        BATCH_SIZE=16 LR=3e-4 LORA_RANK=16 TOP_K=0
#   JUDGE=llm|rules  PRM_URL (the base itself judges when unset)         PRM_M=3 PRM_TEMPERATURE=0.6 PRM_MAX_NEW_TOKENS=4096
#
# `openclaw-rl doctor --model FOLDER --gpu-memory GB` reports what does not fit on the card. Ctrl-C stops all processes.

export PYTHONSAFEPATH=1 # the folder slime/ of this repository is not the library of that name
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [ -z "${HF_CKPT:-}" ]; then
  echo "error: HF_CKPT is needed: Qwen/Qwen3-4B-Thinking-2507, or another model" >&2
  exit 2
fi
if [ -n "${SGLANG_API_KEY:-}" ]; then
  key=${SGLANG_API_KEY//\\/\\\\}
  export OPENCLAW_RL__SERVER__API_KEYS="[{key = \"${key//\"/\\\"}\"}]"
fi

settings=(
  --method "$METHOD" --model "$HF_CKPT" --engine sglang --host "${HOST:-127.0.0.1}" --port "${PORT:-30000}"
  --judge "${JUDGE:-llm}"
  --set "engine.memory_fraction=${MEM_FRACTION_STATIC:-0.5}"
  --set "model.context_length=${CONTEXT_LENGTH:-32768}"
  --set "model.tool_call_parser=${TOOL_CALL_PARSER:-qwen25}"
  --set "model.reasoning_parser=${REASONING_PARSER:-qwen3}"
  --set "trainer.device=cuda"
  --set "trainer.rank=${LORA_RANK:-16}"
  --set "trainer.learning_rate=${LR:-3e-4}"
  --set "training.batch_size=${BATCH_SIZE:-16}"
  --set "judge.votes=${PRM_M:-3}"
  --set "judge.temperature=${PRM_TEMPERATURE:-0.6}"
  --set "judge.max_new_tokens=${PRM_MAX_NEW_TOKENS:-4096}"
  --set "judge.timeout_s=600"
)
[ "$METHOD" = binary_rl ] || settings+=(--set "method.hint_votes=${PRM_M:-3}")
[ "${PRM_M:-3}" -gt 1 ] || settings+=(--set "judge.quorum=1")
[ "${BATCH_SIZE:-16}" -ge 4 ] || settings+=(--set "training.min_batch=${BATCH_SIZE}")
[ "${TOP_K:-0}" = 0 ] || settings+=(--set "method.top_k=$TOP_K")
[ -z "${ENGINE_PYTHON:-}" ] || settings+=(--set "engine.python=$ENGINE_PYTHON")
[ -z "${SAVE_CKPT:-}" ] || settings+=(--data-dir "$SAVE_CKPT")
[ -z "${SERVED_MODEL_NAME:-}" ] || settings+=(--set "server.served_model_name=$SERVED_MODEL_NAME")
[ -z "${PRM_URL:-}" ] || settings+=(--set "judge.url=$PRM_URL")

arguments=() dry_run=""
for argument in "$@"; do
  if [ "$argument" = "--dry-run" ]; then dry_run=1; else arguments+=("$argument"); fi
done
set -- "${PYTHON:-python3}" -m openclaw_rl serve "${settings[@]}" ${arguments[@]+"${arguments[@]}"} # the user's come last
if [ -n "$dry_run" ]; then
  printf '%q ' "$@"
  echo
  exit
fi
export PYTHONPATH="$ROOT/openclaw-rl:$ROOT/openclaw-opd:$ROOT/openclaw-combine${PYTHONPATH:+:$PYTHONPATH}"
exec "$@"

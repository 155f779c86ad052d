# Sourced by the node's launch scripts (openclaw-*/run_qwen3_4b_*.sh): from variables to `python -m openclaw_slime.launch`.
# A script sets METHOD and its defaults, then sources this with its own arguments.
#
#   HF_CKPT          the policy, Hugging Face format (needed)     PRM_MODEL_PATH   the judge's model (default: HF_CKPT)
#   REF_LOAD         reference weights (default: HF_CKPT)          SAVE_CKPT        checkpoints go here and resume from here
#   NUM_GPUS=8 ACTOR_GPUS=4 ROLLOUT_GPUS=2 PRM_GPUS=2             TP=4  ENGINE_TP=ROLLOUT_GPUS  PRM_TP=PRM_GPUS
#   HOST=127.0.0.1 PORT=30000 SERVED_MODEL_NAME SGLANG_API_KEY    TOOL_CALL_PARSER=qwen25
#   PRM_URL (a judge elsewhere; with PRM_GPUS=0)
#   PRM_M PRM_TEMPERATURE=0.6 PRM_MAX_NEW_TOKENS                  BATCH_SIZE LR KL_COEF=0 MAX_TOKENS_PER_GPU=32768
#   PYTHON           interpreter of the environment that holds slime, Megatron and SGLang (default: python3)
#   SLIME_ROOT MEGATRON_ROOT   your checkouts, when they are not installed in that environment
#
# `--dry-run` prints the layout and every command line, and starts nothing. Secrets are never printed: the chat key
# reaches the server by its environment.

export PYTHONSAFEPATH=1 # the folder slime/ of this repository is not the library of that name
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT/openclaw-rl:$ROOT/openclaw-opd:$ROOT/openclaw-combine:$ROOT/slime${SLIME_ROOT:+:$SLIME_ROOT}${MEGATRON_ROOT:+:$MEGATRON_ROOT}${PYTHONPATH:+:$PYTHONPATH}"

if [ -z "${HF_CKPT:-}" ]; then
  echo "error: HF_CKPT is needed: the folder of Qwen3-4B-Thinking-2507, or of another model" >&2
  exit 2
fi
if [ -n "${SGLANG_API_KEY:-}" ]; then
  export OPENCLAW_RL__SERVER__API_KEYS="[{key = \"$SGLANG_API_KEY\"}]"
fi

arguments=(
  --method "$METHOD"
  --hf-checkpoint "$HF_CKPT"
  --num-gpus "${NUM_GPUS:-8}"
  --actor-gpus "${ACTOR_GPUS:-4}"
  --rollout-gpus "${ROLLOUT_GPUS:-2}"
  --prm-gpus "${PRM_GPUS:-2}"
  --actor-tp "${TP:-${ACTOR_GPUS:-4}}"
  --engine-tp "${ENGINE_TP:-${ROLLOUT_GPUS:-2}}"
  --prm-tp "${PRM_TP:-${PRM_GPUS:-2}}"
  --batch-size "${BATCH_SIZE:-16}"
  --learning-rate "${LR:-1e-5}"
  --kl-coef "${KL_COEF:-0}"
  --max-tokens-per-gpu "${MAX_TOKENS_PER_GPU:-32768}"
  --mem-fraction-static "${MEM_FRACTION_STATIC:-0.85}"
  --context-length "${CONTEXT_LENGTH:-32768}"
  --host "${HOST:-127.0.0.1}"
  --port "${PORT:-30000}"
  --tool-call-parser "${TOOL_CALL_PARSER:-qwen25}"
  --prm-votes "${PRM_M:-3}"
  --prm-temperature "${PRM_TEMPERATURE:-0.6}"
  --prm-max-new-tokens "${PRM_MAX_NEW_TOKENS:-4096}"
)
[ -z "${REF_LOAD:-}" ] || arguments+=(--ref-load "$REF_LOAD")
[ -z "${SAVE_CKPT:-}" ] || arguments+=(--save "$SAVE_CKPT")
[ -z "${PRM_MODEL_PATH:-}" ] || arguments+=(--prm-checkpoint "$PRM_MODEL_PATH")
[ -z "${PRM_URL:-}" ] || arguments+=(--prm-url "$PRM_URL")
[ -z "${SERVED_MODEL_NAME:-}" ] || arguments+=(--served-model-name "$SERVED_MODEL_NAME")
exec "${PYTHON:-python3}" -m openclaw_slime.launch "${arguments[@]}" "$@"

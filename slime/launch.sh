# Sourced by the node's launch scripts (openclaw-*/run_qwen3_4b_*.sh): from variables to `python -m openclaw_slime.launch`.
# A script sets METHOD and its defaults, then sources this with its own arguments.
#
#   HF_CKPT          the policy, Hugging Face format (needed)     PRM_MODEL_PATH   the judge's model (default: HF_CKPT)
#   REF_LOAD         reference weights (default: HF_CKPT)          SAVE_CKPT        ledger, versions and checkpoints go
#   CHECKPOINT_EVERY=20   updates, CHECKPOINT_MINUTES=30                            here and are resumed from here
#   NUM_GPUS=8 ACTOR_GPUS=4 ROLLOUT_GPUS=2 PRM_GPUS=2             TP=ACTOR_GPUS/CP/PP  CP=1  PP=1
#   ROLLOUT_ENGINES=1 (policy engines; they share ROLLOUT_GPUS)   ENGINE_TP=ROLLOUT_GPUS/ROLLOUT_ENGINES
#   OPTIMIZER=auto|gpu|cpu GPU_GB=80 TRAIN_PRECISION=bf16|fp8     PRM_TP=PRM_GPUS
#   ENGINE_PRECISION=bf16 (others are refused with the reason)    TRY_FP8=1 lets TRAIN_PRECISION=fp8 start: it is untried
#   HOST=127.0.0.1 PORT=30000 PRM_PORT=30001 (at most 55535)      SERVED_MODEL_NAME SGLANG_API_KEY
#   TOOL_CALL_PARSER=qwen25 REASONING_PARSER=qwen3                CONTEXT_LENGTH=32768 MEM_FRACTION_STATIC=0.85
#   PRM_URL (a judge elsewhere; with PRM_GPUS=0)                  JUDGE=llm|rules (rules: no model judges)
#   PRM_ARGS (more words for the PRM's SGLang)
#   PRM_M PRM_TEMPERATURE=0.6 PRM_MAX_NEW_TOKENS (of verdicts     BATCH_SIZE=16 LR=1e-5 TOP_K=0
#   and of hints)                                                 KL_COEF (0; 0.01 where the policy is its own teacher)
#   TEMPERATURE=0.6 MAX_NEW_TOKENS=8192 (of chats that set none)
#   MAX_TOKENS_PER_GPU=32768                                      RAY_ADDRESS (a running cluster)
#   PUSH=nccl|disk (nccl to one engine, disk to several)
#   ACTOR_NODES=0 (other nodes of that cluster that train, each with ACTOR_GPUS; 0: this node trains)
#   PYTHON           interpreter of the environment that holds slime and Megatron (default: python3)
#   SERVER_PYTHON ENGINE_PYTHON   those of the server's and of SGLang's, where they are others
#   SLIME_ROOT MEGATRON_ROOT   your checkouts, when they are not installed in that environment
#
# `--dry-run` prints the layout and every command line, and starts nothing. Ctrl-C or SIGTERM stops all that was started,
# after the step in hand and its checkpoint. Secrets are never printed: the chat key reaches the server by its
# environment. Arguments go on to `openclaw_slime.launch` (`--help`).

export PYTHONSAFEPATH=1 # the folder slime/ of this repository is not the library of that name
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT/openclaw-rl:$ROOT/openclaw-opd:$ROOT/openclaw-combine:$ROOT/slime${SLIME_ROOT:+:$SLIME_ROOT}${MEGATRON_ROOT:+:$MEGATRON_ROOT}${PYTHONPATH:+:$PYTHONPATH}"

if [ -z "${HF_CKPT:-}" ]; then
  echo "error: HF_CKPT is needed: the folder of Qwen3-4B-Thinking-2507, or of another model" >&2
  exit 2
fi
if [ -n "${SGLANG_API_KEY:-}" ]; then
  key=${SGLANG_API_KEY//\\/\\\\}
  export OPENCLAW_RL__SERVER__API_KEYS="[{key = \"${key//\"/\\\"}\"}]"
fi

arguments=(
  --method "$METHOD"
  --hf-checkpoint "$HF_CKPT"
  --num-gpus "${NUM_GPUS:-8}"
  --actor-gpus "${ACTOR_GPUS:-4}"
  --actor-nodes "${ACTOR_NODES:-0}"
  --rollout-gpus "${ROLLOUT_GPUS:-2}"
  --prm-gpus "${PRM_GPUS:-2}"
  --actor-cp "${CP:-1}"
  --actor-pp "${PP:-1}"
  --optimizer "${OPTIMIZER:-auto}"
  --gpu-gb "${GPU_GB:-80}"
  --train-precision "${TRAIN_PRECISION:-bf16}"
  --engine-precision "${ENGINE_PRECISION:-bf16}"
  --rollout-engines "${ROLLOUT_ENGINES:-1}"
  --prm-tp "${PRM_TP:-${PRM_GPUS:-2}}"
  --batch-size "${BATCH_SIZE:-16}"
  --learning-rate "${LR:-1e-5}"
  --temperature "${TEMPERATURE:-0.6}"
  --max-new-tokens "${MAX_NEW_TOKENS:-8192}"
  --max-tokens-per-gpu "${MAX_TOKENS_PER_GPU:-32768}"
  --mem-fraction-static "${MEM_FRACTION_STATIC:-0.85}"
  --context-length "${CONTEXT_LENGTH:-32768}"
  --host "${HOST:-127.0.0.1}"
  --port "${PORT:-30000}"
  --tool-call-parser "${TOOL_CALL_PARSER:-qwen25}"
  --reasoning-parser "${REASONING_PARSER:-qwen3}"
  --judge "${JUDGE:-llm}"
  --top-k "${TOP_K:-0}"
  --checkpoint-every "${CHECKPOINT_EVERY:-20}"
  --checkpoint-minutes "${CHECKPOINT_MINUTES:-30}"
  --prm-votes "${PRM_M:-3}"
  --prm-temperature "${PRM_TEMPERATURE:-0.6}"
  --prm-max-new-tokens "${PRM_MAX_NEW_TOKENS:-4096}"
)
[ "${TRY_FP8:-0}" = 0 ] || arguments+=(--try-fp8)
[ -z "${TP:-}" ] || arguments+=(--actor-tp "$TP")
[ -z "${ENGINE_TP:-}" ] || arguments+=(--engine-tp "$ENGINE_TP")
[ -z "${PUSH:-}" ] || arguments+=(--push "$PUSH")
[ -z "${KL_COEF:-}" ] || arguments+=(--kl-coef "$KL_COEF")
[ -z "${REF_LOAD:-}" ] || arguments+=(--ref-load "$REF_LOAD")
[ -z "${SAVE_CKPT:-}" ] || arguments+=(--data-dir "$SAVE_CKPT")
[ -z "${RAY_ADDRESS:-}" ] || arguments+=(--ray-address "$RAY_ADDRESS")
[ -z "${SERVER_PYTHON:-}" ] || arguments+=(--server-python "$SERVER_PYTHON")
[ -z "${ENGINE_PYTHON:-}" ] || arguments+=(--engine-python "$ENGINE_PYTHON")
[ -z "${PRM_MODEL_PATH:-}" ] || arguments+=(--prm-checkpoint "$PRM_MODEL_PATH")
[ -z "${PRM_PORT:-}" ] || arguments+=(--prm-port "$PRM_PORT")
[ -z "${PRM_ARGS:-}" ] || arguments+=(--prm-args="$PRM_ARGS") # it begins with a dash
[ -z "${PRM_URL:-}" ] || arguments+=(--prm-url "$PRM_URL")
[ -z "${SERVED_MODEL_NAME:-}" ] || arguments+=(--served-model-name "$SERVED_MODEL_NAME")
exec "${PYTHON:-python3}" -m openclaw_slime.launch "${arguments[@]}" "$@"

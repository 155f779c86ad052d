# Sourced by the scripts of 8B and 32B policies: SGLang, slime and Megatron on a node of 8 GPUs, and the runner beside them.
# A script sets GROUPS, GROUP_SIZE, STEPS, KL_COEF, ENVIRONMENT, PROCESS_WEIGHT and its defaults, then sources this file.
#
#   HF_CKPT   the policy (needed)            TASKS   folder of Harbor tasks, or the file of a script that names one (needed,
#   EVAL_TASKS   held-out ones (default: 20 %)       unless the script says NEEDS_TASKS=0: its environment brings its own)
#   RUN       plan, journal, logs (default: runs/NAME)              AGENTS_PYTHON   of scripts/agents/env.sh
#   UPDATES=200   CONCURRENCY=64   MAX_TOKENS of a reply (4096)     all variables of slime/launch.sh
#
# Nothing of this was run: it needs the node, the model and the tasks, which are yours to name.
. "$(dirname "${BASH_SOURCE[0]}")/both.sh"
NEEDS_TASKS=${NEEDS_TASKS:-1}
for name in HF_CKPT TASKS; do
  if [ -z "${!name:-}" ] && [ "$name$NEEDS_TASKS" != TASKS0 ]; then
    echo "error: $name is needed" >&2
    exit 2
  fi
done
RUN=${RUN:-$ROOT/runs/$NAME}
TEMPERATURE=${TEMPERATURE:-1}
BATCH_SIZE=${BATCH_SIZE:-$((GROUPS_PER_STEP * GROUP_SIZE * STEPS))}
[ -z "${SGLANG_API_KEY:-}" ] || export OPENCLAW_RL_AGENTS_KEY=$SGLANG_API_KEY
server=(
  env METHOD=agent "HF_CKPT=$HF_CKPT" "PORT=$PORT" "LR=${LR:-1e-6}" "KL_COEF=$KL_COEF" "TEMPERATURE=$TEMPERATURE"
  "ACTOR_GPUS=$ACTOR_GPUS" "ROLLOUT_GPUS=$ROLLOUT_GPUS" "PRM_GPUS=$PRM_GPUS" "JUDGE=$JUDGE" "PRM_M=$PRM_M"
  # slime's batch holds every step of the groups, or it cuts them. As many again wait, of the groups that are ahead.
  "BATCH_SIZE=$BATCH_SIZE"
  "OPENCLAW_RL__TRAINING__MAX_WAITING=$((2 * BATCH_SIZE))"
  "OPENCLAW_RL__METHOD__PROCESS_WEIGHT=$PROCESS_WEIGHT"
  "OPENCLAW_RL__EPISODES__GROUPS_PER_STEP=$GROUPS_PER_STEP"
  # A step's worth of groups is played while the trainer works on the one before.
  "OPENCLAW_RL__EPISODES__MAX_GROUPS_AHEAD=$((2 * GROUPS_PER_STEP))"
  bash -c '. "$0"' "$ROOT/slime/launch.sh" --data-dir "$RUN/server"
)
runner=("${AGENTS_PYTHON:-$ROOT/.venv-agents${AGENTS_KIND:+-$AGENTS_KIND}/bin/python}" -m openclaw_rl.cli.agents run "$RUN/plan.toml" --server "$URL")

plan() {
  local tasks="" held_out=""
  [ "$NEEDS_TASKS" = 0 ] || tasks="tasks = \"$TASKS\""
  [ -z "${EVAL_TASKS:-}" ] || held_out="eval_tasks = \"$EVAL_TASKS\""
  cat <<PLAN
environment = "$ENVIRONMENT"
folder = "$RUN/run"
sampling = { temperature = $TEMPERATURE, max_tokens = ${MAX_TOKENS:-4096} }
[options]
$tasks
$held_out
[train]
groups = $((${UPDATES:-200} * GROUPS_PER_STEP))
group_size = $GROUP_SIZE
concurrency = ${CONCURRENCY:-64}
[limits]
steps = $STEPS
[eval]
every_versions = 20
PLAN
}

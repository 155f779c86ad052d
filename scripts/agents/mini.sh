# Sourced by the scripts NAME_mini.sh: the bundled 135M model learns a miniature on two cores. A script sets NAME,
# ENVIRONMENT and MAX_TOKENS, then sources this file. The rates are the measured defaults of the method on that model.
#   RUN   plan, journal, ledger (default: runs/NAME)   UPDATES=30   GROUPS_PER_STEP=8   GROUP_SIZE=8   SEED=0   PORT=30000
. "$(dirname "${BASH_SOURCE[0]}")/both.sh"
. "$ROOT/scripts/venv.sh"
RUN=${RUN:-$ROOT/runs/$NAME}
GROUPS_PER_STEP=${GROUPS_PER_STEP:-8}
server=(
  openclaw-rl serve --method agent --data-dir "$RUN/server" --port "$PORT"
  --set "episodes.groups_per_step=$GROUPS_PER_STEP"
  --set "episodes.max_groups_ahead=$((2 * GROUPS_PER_STEP))"
  --set "method.process_weight=${PROCESS_WEIGHT:-1}"
)
runner=(openclaw-rl agents run "$RUN/plan.toml" --server "$URL")
prepare() { ensure_venv local; }

plan() {
  cat <<PLAN
environment = "$ENVIRONMENT"
folder = "$RUN/run"
seed = ${SEED:-0}
sampling = { temperature = 1.0, max_tokens = $MAX_TOKENS }
[options]
seed = ${SEED:-0}
[train]
groups = $((${UPDATES:-30} * GROUPS_PER_STEP))
group_size = ${GROUP_SIZE:-8}
concurrency = 16
[limits]
steps = 4
act_s = 300.0
[eval]
tasks = 200
concurrency = 16
every_versions = ${EVAL_EVERY:-10}
PLAN
}

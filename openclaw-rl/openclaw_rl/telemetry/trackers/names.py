"""Public names of figures: one table from the ledger's short names to the names that trackers show.

A name is slime's where slime has the same figure, because slime trains the node and its runs are compared with ours.
Every other figure of a step is `train/<short name>`. `instructions/metrics.md` explains each
row, and a test compares the two.
"""

from collections.abc import Mapping

NAMES: Mapping[str, str] = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/lr-pg_0",
    "ref_kl": "train/kl_loss",
    "clip_share": "train/pg_clipfrac",
    "masked_share": "train/tis_clipfrac",
    "abs_log_ratio": "train/train_rollout_logprob_abs_diff",
    "reward_mean": "rollout/raw_reward",
    "advantage_mean": "rollout/advantages",
    "step_s": "perf/step_time",
    "gradient_s": "perf/actor_train_time",
    "reference_s": "perf/ref_log_probs_time",
    "gate_kl_parent": "gate/kl_parent",
    "gate_kl_base": "gate/kl_base",
    "gate_canary_drop": "gate/canary_drop",
    "gate_refused": "gate/refused",
    "version_lag": "version/lag_mean",
    "rolled_back": "version/rolled_back",
    "batch_samples": "turns/samples",
    "practice_samples": "turns/practice_samples",
}


def public(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures by their public names."""
    return {NAMES.get(name, f"train/{name}"): value for name, value in figures.items()}

"""From a leased batch to slime's training data, exact ids, log-probs and masks, and nothing slime would make up.

slime trains on exactly `global_batch_size` samples a step and trims what is over: a silent loss. So a batch of n < G is
filled with zero-mask copies of its shortest sample, and every denominator is scaled by n / G, because slime divides by
G: Σ_i l_i / (T_i · n/G) / G = Σ_i l_i / T_i / n. The gradient is that of a batch of n.

What slime has no key for travels as one JSON text a sample (`Extras`) under `source_names`, the one list of strings
that slime hands to every rank and reads nowhere in training. Absent terms are absent there, never zeros.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from openclaw_rl.errors import TrainerError
from openclaw_rl.methods.base import Method
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainers.api import SampleBody
from openclaw_rl.types import DropReason

EXTRAS_KEY = "source_names"


class Extras(BaseModel):
    """One sample's part of the batch that slime does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample: SampleBody
    advantages: list[float]  # [T]
    parent: int | None = None
    """The version that is trained from: what it sampled itself tells whether the engine got its weights."""
    is_filler: bool = False


def unusable(samples: Sequence[SampleBody], method: Method, settings: TrainerSettings) -> dict[str, DropReason]:
    """Leased samples that no step can be made of, by reason; driver and rollout function must agree on them."""
    found: dict[str, DropReason] = {}
    for body in samples:
        if not body.prompt_ids:
            found[body.sample_id] = DropReason.EMPTY  # nothing predicts the first token
        elif len(body.prompt_ids) + len(body.response_ids) > settings.max_tokens:
            found[body.sample_id] = DropReason.TOO_LONG
        elif not method.can_train(body.noun()):
            found[body.sample_id] = DropReason.METHOD  # made by another method, before the settings changed
    return found


def extras_of(
    samples: Sequence[SampleBody],
    advantages: Sequence[Sequence[float]],
    batch_size: int,
    *,
    parent: int | None = None,
) -> list[Extras]:
    """The batch in lease order, filled up to `batch_size`. Raises TrainerError for a batch that is empty or over it."""
    if not 0 < len(samples) <= batch_size:
        raise TrainerError(f"a batch of {len(samples)} samples cannot make a step of {batch_size}")
    rows = [
        Extras(sample=sample, advantages=list(credit), parent=parent)
        for sample, credit in zip(samples, advantages, strict=True)
    ]
    shortest = min(rows, key=lambda row: len(row.sample.prompt_ids) + len(row.sample.response_ids))
    filler = shortest.model_copy(update={"is_filler": True})
    return rows + [filler] * (batch_size - len(rows))


def train_data_of(rows: Sequence[Extras]) -> dict[str, Any]:
    """slime's `train_data`: its own keys (pinned in the contract tests), one entry a sample."""
    n = sum(not row.is_filler for row in rows)
    share = n / len(rows)
    masks = [[0] * len(r.sample.loss_mask) if r.is_filler else [int(m) for m in r.sample.loss_mask] for r in rows]
    rewards = [0.0 if row.sample.reward is None else row.sample.reward for row in rows]  # for slime's log alone
    return {
        "tokens": [row.sample.prompt_ids + row.sample.response_ids for row in rows],
        "response_lengths": [len(row.sample.response_ids) for row in rows],
        "rewards": rewards,
        "raw_reward": rewards,
        "truncated": [0] * len(rows),
        "sample_indices": list(range(len(rows))),
        "rollout_ids": list(range(len(rows))),
        "loss_masks": masks,
        "rollout_mask_sums": [max(sum(mask), 1) * share for mask in masks],
        "rollout_log_probs": [row.sample.rollout_log_probs for row in rows],
        EXTRAS_KEY: [row.model_dump_json() for row in rows],
    }


def train_data(args: Any, samples: Sequence[Any]) -> Mapping[str, Any]:
    """slime's hook `--custom-convert-samples-to-train-data-path`: the samples carry their `Extras` as metadata."""
    return train_data_of([Extras.model_validate(sample.metadata["openclaw"]) for sample in samples])

"""slime's side of a lease: the driver's leased batch, fetched again and converted to slime's training data.

    --data-source-path                           openclaw_slime.rollout.LeasedBatches
    --rollout-function-path                      openclaw_slime.rollout.generate_rollout
    --custom-rollout-log-function-path           openclaw_slime.rollout.log_nothing
    --custom-convert-samples-to-train-data-path  openclaw_slime.rollout.train_data

Chats generate the samples, not slime. The driver calls slime once a batch is leased, with the lease's fence as slime's
`rollout_id`; `generate` returns at once and never delays a push. The method's own state (a baseline's mean) lives here
between batches, and is saved with slime's checkpoints.

Ids, log-probs and masks are exact. slime trains on exactly `global_batch_size` samples a step and trims the rest
without a message. So a batch of n < G is filled with zero-mask copies of its shortest sample. slime divides by G, so
every divisor is scaled by n / G: Σ_i l_i / (T_i · n/G) / G = Σ_i l_i / T_i / n. The gradient is that of a batch of n.

Values without a key of slime travel as one JSON text a sample (`Extras`) under `source_names`. That is the one list of
strings that slime hands to every rank and does not read in training. Absent terms are absent there, never zeros.
"""

# mypy: disable-error-code="import-not-found"
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from openclaw_rl.errors import TrainerError
from openclaw_rl.methods.base import Method, load_method
from openclaw_rl.settings import TrainerSettings
from openclaw_rl.trainer_protocol import LeaseRef, SampleBody
from openclaw_rl.trainers.client import TrainerClient
from openclaw_rl.types import DropReason
from openclaw_slime.node import NodeConfig

EXTRAS_KEY = "source_names"


class Extras(BaseModel):
    """One sample's values that slime has no key for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample: SampleBody
    advantages: list[float]  # [T]
    parent: int | None = None
    """The version trained from. Its own samples show whether the engine got its weights."""
    lease_id: str = ""
    is_filler: bool = False


def unusable(samples: Sequence[SampleBody], method: Method, settings: TrainerSettings) -> dict[str, DropReason]:
    """Return the leased samples that cannot be trained on, with reasons. The driver and slime both call this."""
    found: dict[str, DropReason] = {}
    for body in samples:
        if not body.prompt_ids:
            found[body.sample_id] = DropReason.EMPTY  # nothing predicts the first token
        elif len(body.prompt_ids) + len(body.response_ids) > settings.max_tokens:
            found[body.sample_id] = DropReason.TOO_LONG
        elif not method.can_train(body.to_sample()):
            found[body.sample_id] = DropReason.METHOD  # made by another method, before the settings changed
    return found


def extras_of(
    samples: Sequence[SampleBody],
    advantages: Sequence[Sequence[float]],
    batch_size: int,
    *,
    parent: int | None = None,
    lease_id: str = "",
) -> list[Extras]:
    """Return the batch in lease order, filled up to `batch_size`.

    Raises TrainerError for a batch that is empty or larger.
    """
    if not 0 < len(samples) <= batch_size:
        raise TrainerError(f"a batch of {len(samples)} samples cannot make a step of {batch_size}")
    rows = [
        Extras(sample=sample, advantages=list(credit), parent=parent, lease_id=lease_id)
        for sample, credit in zip(samples, advantages, strict=True)
    ]
    shortest = min(rows, key=lambda row: len(row.sample.prompt_ids) + len(row.sample.response_ids))
    filler = shortest.model_copy(update={"is_filler": True})
    return rows + [filler] * (batch_size - len(rows))


def train_data_of(rows: Sequence[Extras]) -> dict[str, Any]:
    """Return slime's `train_data`: its own keys (pinned in the contract tests), one entry a sample."""
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
    """Convert slime's samples, which carry their `Extras` as metadata, to training data; a hook of slime."""
    return train_data_of([Extras.model_validate(sample.metadata["openclaw"]) for sample in samples])


@dataclass(frozen=True, slots=True)
class _OpenBatch:
    """The last batch, whose step is not yet known to be made."""

    fence: int
    parent: int
    state: dict[str, float]
    """The method's state if that batch makes a version."""


class LeasedBatches:
    """slime's data source, built once in the rollout manager's process."""

    def __init__(self, args: Namespace) -> None:
        config = NodeConfig.of(args)
        self._config, self._batch_size, self._folder = config, args.global_batch_size, args.save
        self._method = load_method(config.method.name)
        self._client = TrainerClient(config.url, config.token.get_secret_value())
        self._state: dict[str, float] = {}
        """The method's state behind the last step that was made."""
        self._open: _OpenBatch | None = None

    def batch(self, fence: int) -> list[Extras]:
        """Return the rows of the live lease with this fence. Raises CommitRefused when it is over."""
        lease = self._client.leased(fence)
        if self._open is not None and lease.parent != self._open.parent:  # the last batch made a version
            self._state = self._open.state
        left_out = unusable(lease.samples, self._method, self._config.trainer)
        bodies = [body for body in lease.samples if body.sample_id not in left_out]
        state = dict(self._state)
        credit = self._method.advantages([body.to_sample() for body in bodies], self._config.method, state)
        self._open = _OpenBatch(fence, lease.parent, state)
        return extras_of(bodies, credit, self._batch_size, parent=lease.parent, lease_id=lease.lease_id)

    # slime's `DataSource`

    def save(self, rollout_id: int) -> None:
        """Save the method's state behind the step of the lease with this fence. A repeated call saves it again."""
        # A later batch whose step was left out has no part in it.
        if self._open is not None and self._open.fence == rollout_id:
            self._state, self._open = self._open.state, None
        file = _state_file(self._folder, rollout_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self._state))

    def load(self, rollout_id: int | None = None) -> None:
        """Load the method's state of a checkpoint; without one (the base) it starts fresh."""
        file = None if rollout_id is None or self._folder is None else _state_file(self._folder, rollout_id)
        self._state = json.loads(file.read_text()) if file is not None and file.is_file() else {}
        self._open = None

    def get_samples(self, num_samples: int) -> list[Any]:
        raise NotImplementedError("samples come by lease")

    def add_samples(self, samples: Sequence[Any]) -> None:
        raise NotImplementedError("samples come by lease")

    def __len__(self) -> int:
        return 0


def generate_rollout(args: Namespace, rollout_id: int, data_source: LeasedBatches, evaluation: bool = False) -> Any:
    """Return the leased batch as slime's samples; a hook of slime. `rollout_id`: the fence of the lease."""
    from slime.rollout.base_types import RolloutFnTrainOutput

    if evaluation:
        raise NotImplementedError("there is nothing to evaluate on: no --eval-interval")
    rows = data_source.batch(rollout_id)
    return RolloutFnTrainOutput(samples=[[_sample(row, n)] for n, row in enumerate(rows)], metrics={})


def log_nothing(rollout_id: int, args: Namespace, samples: Any, metrics: Any, seconds: float) -> bool:
    """Skip slime's rollout log, whose figures are of a generation that did not happen here; a hook of slime."""
    return True


def _sample(row: Extras, index: int) -> Any:
    from slime.utils.types import Sample

    body: SampleBody = row.sample
    return Sample(
        index=index,
        group_index=index,
        tokens=body.prompt_ids + body.response_ids,
        response_length=len(body.response_ids),
        reward=0.0 if body.reward is None else body.reward,
        loss_mask=[0 if row.is_filler else int(mask) for mask in body.loss_mask],
        rollout_log_probs=body.rollout_log_probs,
        status=Sample.Status.COMPLETED,
        metadata={"openclaw": row.model_dump()},
    )


def lease_of(rollout_id: int, data: Mapping[str, Any]) -> LeaseRef:
    """Return the lease of a rank's part of the training data; every part has a row."""
    return LeaseRef(lease_id=Extras.model_validate_json(data[EXTRAS_KEY][0]).lease_id, fence=rollout_id)


def _state_file(folder: str | None, rollout_id: int) -> Path:
    if folder is None:
        raise ValueError("--save is needed to keep the method's state")
    return Path(folder) / f"method_state_{rollout_id:07d}.json"

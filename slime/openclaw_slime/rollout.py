"""slime's side of a lease: the batch that the driver leased, asked for once more and handed on as slime's samples.

    --data-source-path                    openclaw_slime.rollout.LeasedBatches
    --rollout-function-path               openclaw_slime.rollout.generate_rollout
    --custom-rollout-log-function-path    openclaw_slime.rollout.log_nothing

Nothing is generated here: chats do that. The driver calls with the lease's fence as slime's `rollout_id`, once a batch
is there, so `generate` returns at once and never stands in the way of a push. The method's own state (a baseline's
mean) lives here, between batches, and is kept with slime's checkpoints.
"""

# mypy: disable-error-code="import-not-found"

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.trainers.api import SampleBody
from openclaw_rl.trainers.client import TrainerClient
from openclaw_slime.node import NodeConfig, find_method
from openclaw_slime.samples import Extras, extras_of, unusable


class LeasedBatches:
    """slime's data source, built once in the rollout manager's process."""

    def __init__(self, args: Namespace) -> None:
        config = NodeConfig.of(args)
        self._config, self._batch_size, self._folder = config, args.global_batch_size, args.save
        self._method = find_method(config.method.name)
        self._client = TrainerClient(config.url, config.token.get_secret_value())
        self._state: dict[str, float] = {}
        self._next: tuple[int, dict[str, float]] = (-1, {})
        """The state after the last batch, and the version that batch was to make a successor of."""

    def batch(self, fence: int) -> list[Extras]:
        """The live lease with this fence. Raises CommitRefused when it is over."""
        lease = self._client.leased(fence)
        parent, state = self._next
        if parent != -1 and lease.parent != parent:  # the last batch made a version
            self._state = state
        left_out = unusable(lease.samples, self._method, self._config.trainer)
        bodies = [body for body in lease.samples if body.sample_id not in left_out]
        state = dict(self._state)
        credit = self._method.advantages([body.noun() for body in bodies], self._config.method, state)
        self._next = (lease.parent, state)
        return extras_of(bodies, credit, self._batch_size, parent=lease.parent)

    # slime's `DataSource`

    def save(self, rollout_id: int) -> None:
        """Called when the step of the last batch is done: its state is kept."""
        self._state = dict(self._next[1])
        self._next = (-1, {})
        file = _state_file(self._folder, rollout_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self._state))

    def load(self, rollout_id: int | None = None) -> None:
        """Of a checkpoint without one (the base): fresh."""
        file = None if rollout_id is None or self._folder is None else _state_file(self._folder, rollout_id)
        self._state = json.loads(file.read_text()) if file is not None and file.is_file() else {}
        self._next = (-1, {})

    def get_samples(self, num_samples: int) -> list[Any]:
        raise NotImplementedError("samples come by lease")

    def add_samples(self, samples: Sequence[Any]) -> None:
        raise NotImplementedError("samples come by lease")

    def __len__(self) -> int:
        return 0


def generate_rollout(args: Namespace, rollout_id: int, data_source: LeasedBatches, evaluation: bool = False) -> Any:
    """slime's hook: `rollout_id` is the fence of the lease in hand."""
    from slime.rollout.base_types import RolloutFnTrainOutput

    if evaluation:
        raise NotImplementedError("there is nothing to evaluate on: no --eval-interval")
    rows = data_source.batch(rollout_id)
    return RolloutFnTrainOutput(samples=[[_sample(row, n)] for n, row in enumerate(rows)], metrics={})


def log_nothing(rollout_id: int, args: Namespace, samples: Any, metrics: Any, seconds: float) -> bool:
    """slime's hook: its figures are of a generation that did not happen here."""
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


def _state_file(folder: str | None, rollout_id: int) -> Path:
    if folder is None:
        raise ValueError("--save is needed to keep the method's state")
    return Path(folder) / f"method_state_{rollout_id:07d}.json"

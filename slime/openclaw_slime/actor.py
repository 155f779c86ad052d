"""slime's Megatron actor, which also returns its share of the step and takes the number of the version it sends.

slime gets the class by its own argument (`create_training_models(..., actor_cls=…)`). One process a GPU.
"""

# mypy: disable-error-code="import-not-found,misc,no-untyped-call"

import secrets
from typing import Any

import torch
from megatron.core import mpu
from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from slime.backends.megatron_utils.update_weight.update_weight_from_distributed import UpdateWeightFromDistributed
from slime.utils.distributed_utils import get_gloo_group

from openclaw_rl.trainer_protocol import LeaseRef
from openclaw_rl.trainers.client import TrainerClient
from openclaw_slime import heartbeat, megatron_fixes
from openclaw_slime.lease_guard import LeaseGuard, is_over_for_all
from openclaw_slime.megatron_fixes import use_group_step_adam
from openclaw_slime.node import NodeConfig, without_ours
from openclaw_slime.outcome import RankShare
from openclaw_slime.rollout import lease_of
from openclaw_slime.rows import Row, row_of, share_of


class NamedUpdates(UpdateWeightFromDistributed):
    """slime's NCCL push, through a group with a fresh name.

    An engine that outlives the driver still has the group of the driver before. It refuses a second group of that name,
    and the driver would wait for it.
    """

    @property
    def _group_name(self) -> str:
        return self._own_name

    @_group_name.setter
    def _group_name(self, name: str) -> None:
        self._own_name = f"{name}-{secrets.token_hex(4)}"


class PolicyActor(MegatronTrainRayActor):
    """slime's actor with the hooks of this plugin."""

    _rows: list[Row]

    def init(self, *args: Any, **kwargs: Any) -> Any:
        use_group_step_adam()
        start = super().init(*args, **kwargs)
        megatron_fixes.set_factor(self.args, self.model)
        megatron_fixes.use_given_rates(self.args, self.optimizer, self.opt_param_scheduler)
        config = NodeConfig.of(self.args)
        self._client = TrainerClient(config.url, config.token.get_secret_value())
        self._guard = LeaseGuard(self.optimizer, self._is_over)
        if type(self.weight_updater) is UpdateWeightFromDistributed:
            self.weight_updater.__class__ = NamedUpdates
        return start

    def train(self, rollout_id: int, rollout_data_ref: Any, external_data: Any = None) -> RankShare:
        """Run slime's step. Return this rank's share of its figures."""
        heartbeat.beat(NodeConfig.of(self.args).heartbeat)
        self._rows = []
        before = self.opt_param_scheduler.num_steps
        super().train(rollout_id, rollout_data_ref, external_data=external_data)
        share = share_of(
            self._rows,
            stepped=self.opt_param_scheduler.num_steps > before,
            counts=_counts(),
            is_lease_over=self._guard.has_left_out,
        )
        self._rows = []
        return share

    def train_actor(self, rollout_id: int, rollout_data: dict[str, Any], external_data: Any = None) -> None:
        self._guard.watch(lease_of(rollout_id, rollout_data))
        super().train_actor(rollout_id, rollout_data, external_data=external_data)
        self._rows = [row_of(tensor) for tensor in rollout_data.get("advantages", ())]

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        with without_ours(self.args):
            super().save_model(rollout_id, force_sync=force_sync)

    def name_next_push(self, weight_version: int) -> None:
        """Set the ledger's number for the next push."""
        # slime counts its own pushes, and adds one before it sends.
        self.weight_updater.weight_version = weight_version - 1

    def _is_over(self, lease: LeaseRef) -> bool:
        torch.cuda.synchronize()  # the gradients: the answer must be the newest when the optimizer begins
        return is_over_for_all(self._client, lease, get_gloo_group())


def _counts() -> bool:
    return bool(mpu.get_tensor_model_parallel_rank() == 0 and mpu.is_pipeline_last_stage())

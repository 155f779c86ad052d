"""slime's parts, started and driven: placement groups, rollout manager and train group, by slime's own functions.

Every name used here is one of the pinned slime; the contract tests look each up in its sources. The policy's engine is
not slime's: the server runs it, and slime attaches to it by address, so that no end of this process touches a chat.
"""

# slime and Ray are untyped, and there only on hosts that train with them.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call"

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from openclaw_slime.node import NodeConfig
from openclaw_slime.outcome import RankShare

log = logging.getLogger(__name__)

STEP_TIMEOUT_S = 3600.0
"""A step that takes longer hangs: some rank waits for one that is gone."""
DISPOSE_S = 10.0


class SlimeNode:
    def __init__(
        self, group: Any, manager: Any, *, batch_size: int, get: Callable[..., Any], by_disk: bool = False
    ) -> None:
        """get: `ray.get`."""
        self._group, self._manager, self._get, self._by_disk = group, manager, get, by_disk
        self.batch_size = batch_size

    @classmethod
    @contextmanager
    def started(
        cls, arguments: Sequence[str], config: NodeConfig, *, ray_address: str | None, resumed: int | None
    ) -> Iterator["SlimeNode"]:
        """`resumed`: the iteration of the checkpoint that `arguments` load."""
        import ray
        from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking
        from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
        from slime.utils.arguments import parse_args

        from openclaw_slime.actor import PolicyActor

        sys.argv = ["openclaw_slime.driver", *arguments]  # slime and Megatron read nothing else
        args = parse_args()
        config.attach(args)
        configure_logger()
        if ray_address is None:
            ray.init(address="local", include_dashboard=False)  # never one that somebody else started here
        else:
            ray.init(address=ray_address)
        try:
            groups = create_placement_groups(args)
            init_tracking(args)
            manager, _ = create_rollout_manager(args, groups["rollout"])
            group, _ = create_training_models(args, groups, manager, actor_cls=PolicyActor)
            if resumed is not None:
                ray.get(manager.load.remote(resumed))
            by_disk = args.update_weight_transport == "disk"
            yield cls(group, manager, batch_size=args.global_batch_size, get=ray.get, by_disk=by_disk)
            with suppress(Exception):  # we leave either way
                ray.get(manager.dispose.remote(), timeout=DISPOSE_S)
            finish_tracking(args)
        finally:
            ray.shutdown()

    def train(self, fence: int) -> Sequence[RankShare]:
        batch = self._get(self._manager.generate.remote(fence), timeout=STEP_TIMEOUT_S)
        shares: list[RankShare] = self._get(self._group.async_train(fence, batch), timeout=STEP_TIMEOUT_S)
        return shares

    def push(self, weight_version: int, timeout_s: float) -> None:
        """What `RayTrainGroup.update_weights` does over NCCL, with a deadline, under the ledger's number. By disk it is
        that itself, which counts on its own and knows no deadline: the server's must do."""
        workers = self._group._actor_handlers
        self._get([worker.name_next_push.remote(weight_version) for worker in workers], timeout=timeout_s)
        if self._by_disk:
            self._group._disk_weight_version = weight_version - 1
            self._group.update_weights()
            return
        self._get([worker.update_weights.remote() for worker in workers], timeout=timeout_s)

    def save(self, iteration: int) -> None:
        self._group.save_model(iteration, force_sync=True)
        self._get(self._manager.save.remote(iteration), timeout=STEP_TIMEOUT_S)

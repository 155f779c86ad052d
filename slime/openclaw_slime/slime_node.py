"""slime's rollout manager and train group, started and driven by slime's own functions.

Every name used here is one of the pinned slime (`contracts`), and is checked in the installed sources before the first
process starts. The policy's engine does not belong to slime: the server runs it, and slime attaches to it by address.
So the end of this process never ends a chat.
"""

# slime and Ray are untyped, and there only on hosts that train with them.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-call"

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from openclaw_rl.errors import CommitRefused
from openclaw_slime import heartbeat
from openclaw_slime.doctor import check_start
from openclaw_slime.node import NodeConfig
from openclaw_slime.outcome import LeftOut, RankShare
from openclaw_slime.weight_push import transfer

log = logging.getLogger(__name__)

STEP_TIMEOUT_S = 3600.0
"""Longest time of a step, even if its ranks report progress."""
LOOK_EVERY_S = 5.0
DISPOSE_S = 10.0


class Ray(Protocol):
    """The functions of the `ray` module that a running node uses."""

    def get(self, refs: Any, *, timeout: float | None = None) -> Any: ...

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]: ...


class SlimeNode:
    """slime as the loop drives it: train, push, save."""

    def __init__(self, group: Any, manager: Any, ray: Ray, *, batch_size: int, heart: Any = None) -> None:
        """heart: a handle of `heartbeat.Heartbeat`, to which the ranks send beats."""
        self._group, self._manager, self._ray, self._heart = group, manager, ray, heart
        self._beats = 0
        self.batch_size = batch_size

    @classmethod
    @contextmanager
    def started(
        cls, arguments: Sequence[str], config: NodeConfig, *, ray_address: str | None, resumed: int | None
    ) -> Iterator["SlimeNode"]:
        """Start slime's parts, and stop them after the block.

        resumed: the iteration of the checkpoint that `arguments` load. Raises SettingsError before the first process
        starts if this slime or Megatron-LM cannot be driven; other differences from the pins are logged.
        """
        check_start(os.environ, log.warning)
        import ray
        from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking
        from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
        from slime.utils.arguments import parse_args

        from openclaw_slime.actor import PolicyActor

        sys.argv = ["openclaw_slime.driver", *arguments]  # slime and Megatron read nothing else
        args = parse_args()
        name = heartbeat.new_name()
        config.model_copy(update={"heartbeat": name}).attach(args)
        configure_logger()
        if ray_address is None:
            ray.init(address="local", include_dashboard=False)  # never a cluster that another user started here
        else:
            ray.init(address=ray_address)
        try:
            heart = heartbeat.start(name)
            groups = create_placement_groups(args)
            init_tracking(args)
            manager, _ = create_rollout_manager(args, groups["rollout"])
            group, _ = create_training_models(args, groups, manager, actor_cls=PolicyActor)
            if resumed is not None:
                ray.get(manager.load.remote(resumed))
            yield cls(group, manager, ray, batch_size=args.global_batch_size, heart=heart)
            with suppress(Exception):  # the process ends either way
                ray.get(manager.dispose.remote(), timeout=DISPOSE_S)
            finish_tracking(args)
        finally:
            ray.shutdown()

    def train(self, fence: int, moved: Callable[[], None], may_step: Callable[[], None]) -> Sequence[RankShare]:
        try:
            (batch,) = self._results([self._manager.generate.remote(fence)], moved)
            may_step()
        except Exception as error:
            # Ray wraps an exception of the manager's process.
            if any(isinstance(found, CommitRefused) for found in (error, getattr(error, "cause", None))):
                raise LeftOut(str(error)) from error
            raise
        return self._results(self._group.async_train(fence, batch), moved)

    def _results(self, refs: list[Any], moved: Callable[[], None]) -> list[Any]:
        """Wait for all results. Call `moved` when one arrives, and when the ranks beat."""
        end, pending = time.monotonic() + STEP_TIMEOUT_S, refs
        while pending:
            ready, pending = self._ray.wait(pending, num_returns=1, timeout=LOOK_EVERY_S)
            self._ray.get(ready)  # raises for a rank that failed: the others would wait for it
            if ready or self._has_beaten():
                moved()
            if time.monotonic() > end:
                raise TimeoutError(f"the step took more than {STEP_TIMEOUT_S:g} s")
        results: list[Any] = self._ray.get(refs)
        return results

    def _has_beaten(self) -> bool:
        before = self._beats
        with suppress(Exception):  # no answer counts as no progress
            self._beats = self._ray.get(self._heart.count.remote(), timeout=LOOK_EVERY_S)
        return self._beats != before

    def push(self, weight_version: int, timeout_s: float) -> None:
        transfer(self._group, self._ray, weight_version, timeout_s=timeout_s)

    def save(self, iteration: int) -> None:
        self._group.save_model(iteration, force_sync=True)
        self._ray.get(self._manager.save.remote(iteration), timeout=STEP_TIMEOUT_S)

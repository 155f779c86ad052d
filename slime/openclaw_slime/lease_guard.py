"""Last look at a lease, between the backward pass of a step and the optimizer.

A deletion or a rollback can end the lease while the ranks compute. No weight has moved then: the step can be left out,
and the driver goes on. A deletion that comes later waits for the commit. slime leaves out a step whose `prepare_grads`
reports a number that is not finite, on every rank and before the optimizer. The guard reports a lease that is over in
the same way.

Promises: one rank asks the server, once a step, and every rank gets its answer. A server that does not answer leaves no
step out: the commit will tell.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from openclaw_rl.errors import CommitRefused, TrainerError
from openclaw_rl.trainer_protocol import LeaseRef
from openclaw_rl.trainers.client import TrainerClient

log = logging.getLogger(__name__)


class LeaseGuard:
    """Stands before one optimizer of Megatron."""

    def __init__(self, optimizer: Any, is_over: Callable[[LeaseRef], bool]) -> None:
        """is_over: True if the lease is over. Every rank calls it at the same point of a step."""
        self._prepare, self._is_over = optimizer.prepare_grads, is_over
        self._lease: LeaseRef | None = None
        self.has_left_out = False
        """True if the last step was left out because its lease was over."""
        optimizer.prepare_grads = self._prepare_grads

    def watch(self, lease: LeaseRef) -> None:
        """Ask for this lease in the next step."""
        self._lease, self.has_left_out = lease, False

    def _prepare_grads(self) -> bool:
        is_not_finite = bool(self._prepare())
        # slime calls this before the step, and Megatron once more inside it: then it is too late.
        lease, self._lease = self._lease, None
        if lease is None:
            return is_not_finite
        self.has_left_out = self._is_over(lease)
        return is_not_finite or self.has_left_out


def is_over(client: TrainerClient, lease: LeaseRef) -> bool:
    """Ask the server. If the lease is live, deletions wait for its commit from now on."""
    try:
        client.renew(lease, begins_step=True)
    except CommitRefused as error:
        log.warning("the lease ended while its step was computed: %s", error)
        return True
    except TrainerError as error:
        log.warning("the server does not say if the lease is live; the step is made all the same: %s", error)
    return False


def is_over_for_all(client: TrainerClient, lease: LeaseRef, group: Any) -> bool:
    """Ask on rank 0 and return its answer on every rank. group: all ranks, over the CPU."""
    answer = torch.tensor([dist.get_rank() == 0 and is_over(client, lease)], dtype=torch.uint8)
    dist.broadcast(answer, src=0, group=group)
    return bool(answer)

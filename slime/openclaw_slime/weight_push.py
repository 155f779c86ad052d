"""Push of the held weights from Megatron to the policy's engine: begin at the server, transfer, end at the server.

The server's half is `openclaw_rl.publishing.weight_push`: between begin and end it holds the chats.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from openclaw_rl.errors import CommitRefused, TrainerError
from openclaw_rl.trainers.client import TrainerClient
from openclaw_slime.outcome import reason_of

log = logging.getLogger(__name__)

PUSH_DEADLINE_S = 90.0
"""Deadline of one push: less than the server holds chats (`engine.hold_s`)."""


class PushFailed(TrainerError):
    """The engine does not surely hold the version."""


class Sender(Protocol):
    """The part of the node that sends its weights to the engine."""

    def push(self, weight_version: int, timeout_s: float) -> None: ...


def send_weights(client: TrainerClient, node: Sender, version: int, *, report: Callable[[str], None]) -> None:
    """Push the version, unless the server refuses that it serves. Raises PushFailed.

    report: tells the server that a transfer failed.
    """
    try:
        client.push_begin(version, deadline_s=PUSH_DEADLINE_S)
    except CommitRefused as error:
        log.warning("version %d is not to be sent: %s", version, error)
        return
    failure = None
    try:
        node.push(version, PUSH_DEADLINE_S / 2)
    except Exception as error:
        failure = error
        report(reason_of(error, f"version {version} was not sent: "))
    try:
        client.push_end(version, None if failure is None else reason_of(failure))
    except TrainerError as error:
        raise PushFailed(f"version {version} was not taken by the engine: {error}") from failure or error
    if failure is not None:
        raise PushFailed(f"version {version} was not sent: {failure!r}") from failure
    log.info("version %d serves", version)


def transfer(group: Any, ray: Any, weight_version: int, *, by_disk: bool, timeout_s: float) -> None:
    """Let slime's ranks send the weights under the ledger's number, as `RayTrainGroup.update_weights` does.

    By disk that method itself is called: it counts versions on its own and has no deadline but the server's.
    """
    workers = group._actor_handlers
    ray.get([worker.name_next_push.remote(weight_version) for worker in workers], timeout=timeout_s)
    if by_disk:
        group._disk_weight_version = weight_version - 1
        group.update_weights()
        return
    ray.get([worker.update_weights.remote() for worker in workers], timeout=timeout_s)

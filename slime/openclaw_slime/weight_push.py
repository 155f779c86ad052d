"""Push of the held weights from Megatron to the policy's engines: begin at the server, transfer, end at the server.

The server's half is `openclaw_rl.publishing.weight_push`. By NCCL, the transfer goes to all engines at once, and the
server holds the chats between begin and end. By disk, the transfer writes a folder, and the server gives it to the
engines.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from openclaw_rl.errors import CommitRefused, TrainerError
from openclaw_rl.trainers.client import TrainerClient
from openclaw_slime.outcome import reason_of

log = logging.getLogger(__name__)

PUSH_DEADLINE_S = 90.0
"""Deadline of one transfer by NCCL: less than the server holds chats (`engine.hold_s`)."""
FILES_DEADLINE_S = 600.0
"""Deadline of the files of one version. No chat waits for them."""
SWAP_S = 120.0
"""Longest time of an engine to take a version, beyond its transfer."""


class PushFailed(TrainerError):
    """The engine does not surely hold the version."""


class Sender(Protocol):
    """The part of the node that sends its weights to the engines, or writes them into a folder."""

    def push(self, weight_version: int, timeout_s: float) -> None: ...


def send_weights(
    client: TrainerClient,
    node: Sender,
    version: int,
    *,
    folder: str | None = None,
    engines: int = 1,
    report: Callable[[str], None],
) -> bool:
    """Push the version. Return False if it does not serve, and may be pushed again. Raises PushFailed.

    folder: the one that `node` writes; None: it sends. engines: their number. report: tells the server that a transfer
    failed.
    """
    deadline_s = PUSH_DEADLINE_S if folder is None else FILES_DEADLINE_S
    try:
        client.push_begin(version, deadline_s=deadline_s, folder=folder)
    except CommitRefused as error:
        log.warning("version %d is not to be sent: %s", version, error)
        return False
    failure = None
    try:
        node.push(version, deadline_s / 2)
    except Exception as error:
        failure = error
        report(reason_of(error, f"version {version} was not sent: "))
    try:
        client.push_end(version, None if failure is None else reason_of(failure), wait_s=SWAP_S * engines)
    except TrainerError as error:
        if folder is not None and failure is None:  # the weights in Megatron and in the folder are whole
            log.warning("version %d was not taken by the engines: %s", version, error)
            return False
        raise PushFailed(f"version {version} was not taken by the engines: {error}") from failure or error
    if failure is not None:
        raise PushFailed(f"version {version} was not sent: {failure!r}") from failure
    log.info("version %d serves", version)
    return True


def transfer(group: Any, ray: Any, weight_version: int, *, timeout_s: float) -> None:
    """Let slime's ranks send the weights under the ledger's number, or write them into the folder of that number.

    It is the first half of `RayTrainGroup.update_weights`. By disk, the second half would give the folder to the
    engines, which the server does.
    """
    workers = group._actor_handlers
    ray.get([worker.name_next_push.remote(weight_version) for worker in workers], timeout=timeout_s)
    ray.get([worker.update_weights.remote() for worker in workers], timeout=timeout_s)

"""Keeps a lease alive while its step runs, from a thread of its own."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openclaw_rl.errors import CommitRefused, TrainerError
from openclaw_rl.trainers.api import LeaseBody
from openclaw_rl.trainers.client import TrainerClient


@contextmanager
def renewing(
    client: TrainerClient, lease: LeaseBody, on_failure: Callable[[LeaseBody, TrainerError], None]
) -> Iterator[Callable[[], bool]]:
    """Renew at a third of the lease's time; gives a function that says whether the lease is still ours. `on_failure` is
    told of calls that failed and will be made again."""
    over, lost = threading.Event(), threading.Event()

    def renew() -> None:
        expires_at = lease.expires_at
        while not over.wait(max(0.5, (expires_at - time.time()) / 3)):
            try:
                expires_at = client.renew(lease)
            except CommitRefused:
                lost.set()
                return
            except TrainerError as error:
                on_failure(lease, error)

    thread = threading.Thread(target=renew, name=f"renew {lease.lease_id}", daemon=True)
    thread.start()
    try:
        yield lambda: not lost.is_set()
    finally:
        over.set()
        thread.join(timeout=1.0)  # a renewal in flight may outlive us; it can do no harm

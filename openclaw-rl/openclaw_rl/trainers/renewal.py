"""Keeps a lease alive while its step runs, from a thread of its own."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openclaw_rl.errors import CommitRefused, TrainerError
from openclaw_rl.trainers.api import LeaseBody
from openclaw_rl.trainers.client import TrainerClient

LONGEST_PAUSE_S = 60.0


@contextmanager
def renewing(
    client: TrainerClient,
    lease: LeaseBody,
    on_failure: Callable[[LeaseBody, TrainerError], None],
    *,
    moved_at: Callable[[], float] = time.monotonic,
    on_hang: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[], bool]]:
    """Renew at a third of the lease's time; gives a function that says whether the lease is still ours. `on_failure` is
    told of calls that failed and will be made again. `moved_at`: when the step last made progress, by the monotonic
    clock; one that made none for as long as a lease lives is renewed no more, and `on_hang` is called, in the thread
    that does not hang."""
    over, lost = threading.Event(), threading.Event()

    def renew() -> None:
        # By a steady clock and the lease's own length: neither clock's hour matters.
        while not over.wait(min(max(0.5, lease.lease_s / 3), LONGEST_PAUSE_S)):
            if time.monotonic() - moved_at() > lease.lease_s:
                lost.set()
                on_hang()
                return
            try:
                client.renew(lease)
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

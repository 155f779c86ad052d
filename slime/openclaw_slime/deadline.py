"""Deadline of work that cannot be interrupted: slime's start and its checkpoints wait for Ray without a limit."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def deadline(seconds: float, on_late: Callable[[], None]) -> Iterator[None]:
    """Call `on_late` from another thread if the block is not over in time. The block itself goes on."""
    timer = threading.Timer(seconds, on_late)
    timer.name, timer.daemon = "deadline", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

"""Where the tokenizer library works.

It keeps a cache of words for each thread that ever tokenised, until that thread ends (4 MB of English by its default,
80 at worst), and long texts are tokenised wherever a pool has a thread free: memory would go up in steps, for hours,
with every thread of the pool that gets its first long text. So the main thread and event loops work where they are, and
all others wait for one of two threads.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_THREADS = 2

T = TypeVar("T")


class FewThreads:
    """They start with the first work, and end with this object."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")

    def run(self, work: Callable[[], T]) -> T:
        """What `work`, which never calls this itself, returns."""
        return work() if _may_stay() else self._pool.submit(work).result()


def _may_stay() -> bool:
    if threading.current_thread() is threading.main_thread():
        return True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

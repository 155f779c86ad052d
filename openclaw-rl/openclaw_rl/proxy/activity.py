"""Chats under way: what runs beside them waits for their end, and gives way to the next one."""

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any


class ChatActivity:
    """Number of chats that run, and the time since the last one ended. It belongs to the event loop."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._ended_at = clock()
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Count a chat; its `end` follows."""
        self._running += 1
        self._notify()

    def end(self) -> None:
        self._running -= 1
        self._ended_at = self._clock()
        self._notify()

    @property
    def is_idle(self) -> bool:
        """True while no chat runs."""
        return not self._running

    @property
    def idle_s(self) -> float:
        """Seconds since the last chat ended; 0 while one runs."""
        return 0.0 if self._running else self._clock() - self._ended_at

    async def begins(self) -> None:
        """Return when a chat runs."""
        while not self._running:
            await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def unless_chat(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`, and cancel it as soon as a chat begins. Return True if it ended; raises its exception."""
        task, chat = asyncio.create_task(work), asyncio.create_task(self.begins())
        try:
            await asyncio.wait((task, chat), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            _raise_first(task)
            return True
        finally:
            for one in (task, chat):
                one.cancel()
            await asyncio.gather(task, chat, return_exceptions=True)


def _raise_first(task: "asyncio.Task[None]") -> None:
    """Raise the task's exception; of a group of them the first, which the caller knows by its kind."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error

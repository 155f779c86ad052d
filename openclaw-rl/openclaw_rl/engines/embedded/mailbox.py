"""How the event loop talks to the model thread: functions that the thread runs between two steps."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from openclaw_rl.errors import EngineGone

T = TypeVar("T")


class Mailbox:
    """Bounded by the HTTP requests in flight: each has one or two functions in it at a time."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Future[Any] | None]] = queue.SimpleQueue()
        self._is_closed = threading.Event()

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` gave or raised on the model thread. Raises EngineGone when the thread has ended."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._put(run, future)
        return await asyncio.wrap_future(future)

    def post(self, function: Callable[[], None]) -> None:
        """Like `call`, without an answer."""
        self._put(function, None)

    def read(self, *, wait: bool) -> None:
        """On the model thread: run what is there; with `wait`, at least one."""
        with contextlib.suppress(queue.Empty):
            function, _ = self._queue.get(block=wait)
            function()
            while True:
                function, _ = self._queue.get_nowait()
                function()

    def close(self) -> None:
        """The thread ends: callers are told, now and later."""
        self._is_closed.set()
        self._refuse()

    def _put(self, function: Callable[[], None], future: "Future[Any] | None") -> None:
        self._queue.put((function, future))
        if self._is_closed.is_set():
            self._refuse()

    def _refuse(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                _, future = self._queue.get_nowait()
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(EngineGone("the model thread has ended"))

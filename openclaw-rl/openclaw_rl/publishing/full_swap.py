"""Swap of the engine's own weights under running chats: *hold → pause → abort → flush → push → resume → release*.

Promises:

- No request is refused. A cut reply waits at the hold and goes on from its tokens so far, under the new version.
- No token is sampled from a prefix that other weights computed.
- A refused push leaves the old weights serving. A push without an answer leaves chats held until `EngineReadiness` has
  pushed the version that should serve.

The order is the one that was measured to be exact on SGLang. A request that is only retracted keeps stale prompt KV,
and a flush with a live request kills the server.

A request that passed the hold just before it closed may reach the engine after the pause. SGLang then keeps it where an
abort does not reach it, and would start it on the new weights under the old version's name. So while a use of the old
version may have a request there, the engine resumes for a moment on the old weights and is paused again.

Leaves to others: the choice of the version (`publisher`), its tests (`publication`, `weight_push`), resuming replies
(`proxy.generation`), a pool whose engines take their turns (`rolling_swap`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.engines.admission import Closed, VersionAdmission
from openclaw_rl.engines.base import Engine
from openclaw_rl.engines.dialect import ModelInfo
from openclaw_rl.errors import EngineGone, EngineRefused

LOOK_S = 0.05
PAUSED_S = 0.25
"""Longest wait of one pause for the requests that it cut."""  # an abort is answered in milliseconds


@dataclass(frozen=True, slots=True)
class SwapTimes:
    """Seconds of a swap's phases."""

    finish_s: float
    """Waiting for replies that are not resumable."""
    cut_s: float
    push_s: float
    held_s: float
    """From hold to release: the longest gap that a stream may have seen."""


class FullWeightSwap:
    """Replaces the engine's weights, by a push from disk or by a transfer of the trainer."""

    def __init__(
        self, engine: Engine, serving: VersionAdmission, *, drain_s: float, call_timeout_s: float, push_timeout_s: float
    ) -> None:
        self._engine, self._serving = engine, serving
        self._drain_s, self._call_timeout_s, self._push_timeout_s = drain_s, call_timeout_s, push_timeout_s
        self.is_unsure = False
        """True while the engine's weights are unknown, because a push got no answer."""

    async def swap(self, weight_version: int, folder: Path) -> SwapTimes:
        """Push the weights of `folder` and switch to their version.

        Raises EngineError. The old version then serves, or chats are held until `EngineReadiness` restores it.
        """
        return await self._replace(lambda: self._push(weight_version, folder))

    async def receive(
        self, weight_version: int, transfer: Callable[[], Awaitable[None]], check: Callable[[], None] = lambda: None
    ) -> SwapTimes:
        """Let the trainer send the weights to the engine while `transfer` runs, and switch to their version.

        check: called right before; the old weights serve on after its error. Else raises as `swap` does.
        """

        async def push() -> None:
            check()
            await self._receive(weight_version, transfer)

        return await self._replace(push)

    async def _replace(self, push: Callable[[], Awaitable[None]]) -> SwapTimes:
        started = time.monotonic()
        self._serving.hold(Closed.SWAP)
        try:
            await self._let_finish()
            cutting = time.monotonic()
            try:
                await cut(self._engine, lambda: self._serving.calls, self._serving.changed, self._call_timeout_s)
                pushing = time.monotonic()
                await push()
            finally:
                await in_time(self._engine.resume(), self._call_timeout_s)
        finally:
            self._serving.release_hold(Closed.SWAP)
        ended = time.monotonic()
        return SwapTimes(cutting - started, pushing - cutting, ended - pushing, ended - started)

    async def _push(self, weight_version: int, folder: Path) -> None:
        try:
            await in_time(self._engine.update_weights(folder, weight_version), self._push_timeout_s)
        except EngineGone:
            self.is_unsure = True
            self._serving.hold(Closed.ENGINE)
            raise
        self.is_unsure = False
        self._serving.switch(weight_version, None)

    async def _receive(self, weight_version: int, transfer: Callable[[], Awaitable[None]]) -> None:
        self.is_unsure = True
        try:
            await transfer()
            async with asyncio.timeout(self._call_timeout_s):
                holds = (await self._engine.model_info()).weight_version
            if holds != str(weight_version):
                raise EngineGone(f"version {weight_version} was sent, and the engine says it holds {holds}")
        except BaseException:
            self._serving.hold(Closed.ENGINE)
            raise
        self.is_unsure = False
        self._serving.switch(weight_version, None)

    async def _let_finish(self) -> None:
        end = time.monotonic() + self._drain_s
        while self._serving.not_resumable and (left_s := end - time.monotonic()) > 0:
            await self._serving.changed(left_s)


async def cut(
    engine: Engine, calls: Callable[[], int], changed: Callable[[float], Awaitable[None]], call_timeout_s: float
) -> None:
    """Pause the engine and empty it of requests. Raises EngineGone when they do not end in time.

    calls: number of our requests that may be on the engine. changed: returns when that number may have changed.
    """
    end = time.monotonic() + call_timeout_s
    while True:
        await in_time(engine.pause("retract"), call_timeout_s)
        if await _is_emptied(engine, calls, changed, call_timeout_s):
            return
        if time.monotonic() > end:
            raise EngineGone(f"requests did not end within {call_timeout_s:g} s")
        await in_time(engine.resume(), call_timeout_s)  # for what came during the pause
        await changed(LOOK_S)


async def _is_emptied(
    engine: Engine, calls: Callable[[], int], changed: Callable[[float], Awaitable[None]], call_timeout_s: float
) -> bool:
    end = time.monotonic() + PAUSED_S
    while True:
        await in_time(engine.abort_all(), call_timeout_s)
        looked = time.monotonic()
        while calls() and (left_s := looked + LOOK_S - time.monotonic()) > 0:
            await changed(left_s)
        if not calls():
            try:
                await in_time(engine.flush_cache(), call_timeout_s)
                return True
            except EngineRefused:  # a request is still queued: another client's, or one on its way
                await asyncio.sleep(LOOK_S)
        if time.monotonic() > end:
            return False


async def in_time(call: Awaitable[None], timeout_s: float) -> None:
    """Await a call of the engine. Raises EngineGone after the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            await call
    except TimeoutError as error:
        raise EngineGone(f"the engine did not answer within {timeout_s:g} s") from error


def is_held(weight_version: int, info: ModelInfo) -> bool:
    """Return True if the engine says that it holds the version; before the first push it holds the base."""
    holds = info.weight_version or "default"
    return holds == str(weight_version) or (weight_version == 0 and holds == "default")

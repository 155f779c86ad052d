"""Replacing the engine's own weights under running chats. *gate → pause → abort → flush → push → continue → gate.*

Promises: nobody is refused; a cut reply waits at the gate and goes on from its tokens so far, under the new version;
no token is sampled from a prefix that other weights computed; a swap that fails leaves the old weights serving. The
order is the one that was measured to be exact on SGLang: a request that is only retracted keeps stale prompt KV, and a
flush with one alive kills the server.

Leaves to others: which version, the gate, the self-test (`publisher`), and resuming (`proxy.generation`).
"""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.engines.base import Engine
from openclaw_rl.engines.serving import Closed, ServingVersions
from openclaw_rl.errors import EngineGone, EngineRefused

LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class SwapTimes:
    """Seconds of a swap's phases."""

    finish_s: float
    """Waiting for replies that should not be cut."""
    cut_s: float
    push_s: float
    held_s: float
    """From the gate's closing to its opening: the longest gap a stream may have seen."""


class FullWeightSwap:
    def __init__(self, engine: Engine, serving: ServingVersions, *, drain_s: float, call_timeout_s: float) -> None:
        self._engine, self._serving, self._drain_s, self._call_timeout_s = engine, serving, drain_s, call_timeout_s

    async def swap(self, weight_version: int, folder: Path) -> SwapTimes:
        """Push the weights of `folder` and switch to their version.

        Raises EngineError when it failed: the old version serves, or nothing does and the keeper restores it.
        """
        started = time.monotonic()
        self._serving.close_gate(Closed.SWAP)
        try:
            await self._let_finish()
            cutting = time.monotonic()
            await self._call(self._engine.pause("retract"))
            try:
                await self._cut()
                pushing = time.monotonic()
                await self._call(self._engine.update_weights(folder, weight_version))
                self._serving.switch(weight_version, None)
            finally:
                await self._call(self._engine.resume())
        finally:
            self._serving.open_gate(Closed.SWAP)
        ended = time.monotonic()
        return SwapTimes(cutting - started, pushing - cutting, ended - pushing, ended - started)

    async def _let_finish(self) -> None:
        end = time.monotonic() + self._drain_s
        while self._serving.unbroken and (left_s := end - time.monotonic()) > 0:
            await self._serving.changed(left_s)

    async def _cut(self) -> None:
        """Until the engine holds nothing: a request that passed the gate just before it closed may still arrive."""
        end = time.monotonic() + self._call_timeout_s
        while True:
            await self._call(self._engine.abort_all())
            if not self._serving.calls:
                try:
                    await self._call(self._engine.flush_cache())
                    return
                except EngineRefused:  # something is still queued: someone else's, or one on its way
                    pass
            if time.monotonic() > end:
                raise EngineGone(f"requests did not end within {self._call_timeout_s:g} s")
            await self._serving.changed(LOOK_S)

    async def _call(self, call: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await call
        except TimeoutError as error:
            raise EngineGone(f"the engine did not answer within {self._call_timeout_s:g} s") from error

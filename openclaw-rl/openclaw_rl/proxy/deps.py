"""What the proxy needs of the rest, as protocols: `sessions.store.Sessions` and `ledger.Ledger` are the real ones."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from openclaw_rl.engines.admission import VersionAdmission
from openclaw_rl.engines.base import Engine
from openclaw_rl.messages import Message
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.settings import SamplingSettings, ServerSettings, SessionSettings
from openclaw_rl.telemetry.health import Health
from openclaw_rl.types import DropReason, Request, Scope, SideCount, Turn


class SessionsPort(Protocol):
    """Never fails a chat."""

    async def observe(self, request: Request) -> str | None: ...

    async def observe_side(self, scope: Scope, messages: Sequence[Message]) -> str | None: ...

    async def served(self, request: Request, turn: Turn) -> bool: ...

    async def abandon(self, request_id: str, reason: DropReason, detail: str = "") -> None: ...

    async def done(self, scope: Scope) -> None: ...


class LedgerPort(Protocol):
    """Raises LedgerError when it cannot write."""

    async def begin(self, request: Request) -> None: ...

    async def count_side(self, side: SideCount) -> None: ...


@dataclass(frozen=True, slots=True)
class ProxyDeps:
    """Everything the proxy is built from."""

    frontend: FrontEnd
    engine: Engine
    serving: VersionAdmission
    sessions: SessionsPort
    ledger: LedgerPort
    server: ServerSettings
    sampling: SamplingSettings
    session: SessionSettings
    model_name: str
    """What `/v1/models` lists."""
    health: Health = field(default_factory=Health)
    """Told whether the engine answers, and whether its numbers can be used."""
    clock: Callable[[], float] = time.time
    """The ledger's."""

"""Asyncio events that connect the server's tasks.

Setting an event means "check the ledger again"; it carries no data. A missed event is harmless, because every task also
polls the ledger at a slow interval.
"""

import asyncio
from dataclasses import dataclass, field

from openclaw_rl.server.api.trainer import LeaseWait
from openclaw_rl.server.trainer_watchdog import TrainerHeartbeat


@dataclass(frozen=True, slots=True)
class ServerEvents:
    engine_exited: asyncio.Event = field(default_factory=asyncio.Event)
    """The server's own engine process ended."""
    paired: asyncio.Event = field(default_factory=asyncio.Event)
    groups: asyncio.Event = field(default_factory=asyncio.Event)
    """An episode ended, or a turn was judged: a group may be ready for its credit."""
    judged: asyncio.Event = field(init=False)
    sampled: asyncio.Event = field(default_factory=asyncio.Event)
    lease_wait: LeaseWait = field(default_factory=LeaseWait)
    trainer_spoke: TrainerHeartbeat = field(default_factory=TrainerHeartbeat)

    def __post_init__(self) -> None:
        object.__setattr__(self, "judged", _Chained(self.groups))


class _Chained(asyncio.Event):
    """An event that sets another one, too: two tasks wait for the same news, and each clears its own."""

    def __init__(self, other: asyncio.Event) -> None:
        super().__init__()
        self._other = other

    def set(self) -> None:
        super().set()
        self._other.set()

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
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    sampled: asyncio.Event = field(default_factory=asyncio.Event)
    lease_wait: LeaseWait = field(default_factory=LeaseWait)
    trainer_spoke: TrainerHeartbeat = field(default_factory=TrainerHeartbeat)

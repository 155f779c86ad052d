"""What one part of the server rings and another waits for. A bell says only *look again*: the ledger says what is
there, and a slow look finds what no bell told.
"""

import asyncio
from dataclasses import dataclass, field

from openclaw_rl.server.api.trainer import LeaseWait
from openclaw_rl.server.trainer_watchdog import TrainerHeartbeat


@dataclass(frozen=True, slots=True)
class ServerEvents:
    engine_exited: asyncio.Event = field(default_factory=asyncio.Event)
    """Our own engine process ended."""
    paired: asyncio.Event = field(default_factory=asyncio.Event)
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    sampled: asyncio.Event = field(default_factory=asyncio.Event)
    lease_wait: LeaseWait = field(default_factory=LeaseWait)
    trainer_spoke: TrainerHeartbeat = field(default_factory=TrainerHeartbeat)

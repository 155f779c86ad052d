"""Lets the ledger go of what is over and old, round by round, while everything else goes on."""

import asyncio
import time
from collections.abc import Callable

import structlog

from openclaw_rl.errors import LedgerError
from openclaw_rl.ledger import Ledger
from openclaw_rl.settings import RetentionSettings

log = structlog.get_logger()

Clock = Callable[[], float]
_DAY_S, _GB = 86400.0, 10**9
_FIRST_S = 60.0
"""After a start, which has enough to do."""
_NEXT_S = 1.0
"""While a round left something to do for the next."""


class Retention:
    """`run` is the app's task; `is_full`: the file is over `retention.max_gb`, and all that is left in it waits."""

    def __init__(self, ledger: Ledger, settings: RetentionSettings, *, clock: Clock = time.time) -> None:
        """clock: the one that requests are received by; a wall clock set ahead would make every turn old."""
        self._ledger, self._settings, self._clock = ledger, settings, clock
        self.is_full = False

    async def run(self) -> None:
        if self._settings.max_age_days is None and self._settings.max_gb is None:
            return
        pause_s = min(_FIRST_S, self._settings.every_s)
        while True:
            await asyncio.sleep(pause_s)
            pause_s = _NEXT_S if await self.round() else self._settings.every_s

    async def round(self) -> bool:
        """Whether something went: there may be more."""
        age, size = self._settings.max_age_days, self._settings.max_gb
        try:
            done = await self._ledger.retain(
                older_than=None if age is None else self._clock() - age * _DAY_S,
                most_bytes=None if size is None else int(size * _GB),
            )
        except LedgerError as error:
            log.warning("retention_failed", error=str(error))
            return False
        if done.turns:
            log.info("turns_let_go", turns=done.turns, pieces=done.pieces, used_mb=round(done.used_bytes / 1e6, 1))
        is_full = done.is_full and not done.turns
        if is_full and not self.is_full:
            log.warning("ledger_full", used_mb=round(done.used_bytes / 1e6, 1), max_gb=size)
        self.is_full = is_full
        return bool(done.turns)

"""Watches what users think of each version, and goes back by itself when it falls.

The verdicts of user turns (tool results say more of the tool than of the policy), by the version that sampled them, are
tested for a fall (`falling`). On one the ledger goes back to the last version before it, whose optimizer state the
trainer then loads; the samples of what was abandoned are dropped, because the same method turned them into that. What
lies behind the fall has another number from then on, so the next finding needs `min_turns` new verdicts: that is the
cooldown. After `pause_after` such falls learning pauses until someone looks.

What it cannot see: a judge that lies in step with the policy (a canary sees it: `canary`), and a fall that comes with
the users' own change of mind.
"""

import asyncio

import structlog

from openclaw_rl.alerts import Alerts
from openclaw_rl.errors import EngineError, LedgerError, LedgerUnavailable
from openclaw_rl.falling import Fall, find_fall
from openclaw_rl.ledger import Ledger
from openclaw_rl.publishing.publisher import Publisher
from openclaw_rl.settings import WatchSettings

log = structlog.get_logger()


class Watch:
    def __init__(self, ledger: Ledger, publisher: Publisher, settings: WatchSettings, alerts: Alerts) -> None:
        self._ledger, self._publisher, self._settings, self._alerts = ledger, publisher, settings, alerts
        self._seen: list[tuple[int, int]] = []
        self.falls = 0
        """Automatic rollbacks since the start."""

    async def run(self) -> None:
        """Look every few seconds whether verdicts came, forever. Owned by the app."""
        while True:
            await asyncio.sleep(self._settings.check_every_s)
            try:
                await self.look()
            except LedgerUnavailable as error:
                log.debug("watch_delayed", error=str(error))

    async def look(self) -> Fall | None:
        """Test once, and go back on a fall."""
        limits = self._settings
        verdicts = await self._ledger.user_verdicts(limit=limits.turns)
        if verdicts == self._seen or await self._ledger.pinned() is not None:  # who pins a version decides alone
            return None
        self._seen = verdicts
        fall = await asyncio.to_thread(
            find_fall, verdicts, min_side=limits.min_turns, drop=limits.drop, p_value=limits.p_value
        )
        if fall is not None:
            await self._go_back(fall)
        return fall

    async def _go_back(self, fall: Fall) -> None:
        figures = {"before": fall.before, "after": fall.after, "p_value": fall.p_value}
        turns = {"turns_before": fall.n_before, "turns_after": fall.n_after}
        try:
            to = await self._ledger.roll_back_behind(fall.good)
        except LedgerError as error:
            self._alerts.raise_alert("verdicts_fall", reason=str(error), **figures, **turns)
            return
        self.falls += 1
        self._alerts.raise_alert("rolled_back", serving=to, good=fall.good, **figures, **turns)
        if self.falls >= self._settings.pause_after:
            await self._ledger.set_learning(False)
            self._alerts.raise_alert("learning_paused", automatic_rollbacks=self.falls)
        try:
            await self._publisher.follow()
        except (EngineError, TimeoutError) as error:  # the publisher tries again
            log.debug("rollback_delayed", error=repr(error))
            self._publisher.wake()

"""Limits of each user: requests at once, and tokens a day. A request over its own limit gets 429; no other one does.

The tokens are those of prompts and replies, side requests among them; practice and demonstrations cost a user nothing.
The day is UTC's. At a user's first chat of a run the ledger tells what was used before; from then on memory counts, so
that a chat costs no read. While the ledger fails, memory alone counts, and each chat asks again. Replies that run are
counted at their end.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from openclaw_rl.errors import LedgerError, RequestError
from openclaw_rl.web.auth import Caller

_DAY_S = 86400.0
_RETRY_AFTER_S = 2
"""A chat of the same user may end at any time."""
_CODE = "rate_limit_exceeded"


class UsageLedger(Protocol):
    """The ledger, as quotas call it."""

    async def tokens_since(self, user: str, since: float) -> int: ...


@dataclass(slots=True)
class _Day:
    number: int
    tokens: int = 0
    is_whole: bool = False
    """The ledger has told what was used before this run."""


class Quotas:
    """Use of the server by each user: requests that run, and tokens of today."""

    def __init__(self, ledger: UsageLedger, clock: Callable[[], float]) -> None:
        self._ledger, self._clock = ledger, clock
        self._running: Counter[str] = Counter()
        self._days: dict[str, _Day] = {}

    @contextmanager
    def running(self, caller: Caller) -> Iterator[None]:
        """Count a request while it runs. Raises RequestError (429) if it is one too many of its user."""
        user, most = caller.user, caller.limits.requests_at_once
        if most is not None and self._running[user] >= most:
            raise RequestError(
                f"{user} has {self._running[user]} requests running; the limit is {most} at once: try again",
                status=429,
                code=_CODE,
                retry_after_s=_RETRY_AFTER_S,
            )
        self._running[user] += 1
        try:
            yield
        finally:
            self._running[user] -= 1
            if not self._running[user]:
                del self._running[user]

    async def check_tokens(self, caller: Caller) -> None:
        """Raise RequestError (429) if the user has used the day's tokens up."""
        most = caller.limits.tokens_a_day
        if most is None:
            return
        now = self._clock()
        number = int(now // _DAY_S)
        day = self._days.setdefault(caller.user, _Day(number))
        if day.number != number:
            day.number, day.tokens = number, 0
        if not day.is_whole:
            await self._read(caller.user, day, number)
        if day.tokens >= most:
            left_s = math.ceil((number + 1) * _DAY_S - now)
            raise RequestError(
                f"{caller.user} has used {day.tokens} tokens today; the limit is {most} a day. The next day (UTC)"
                f" begins in {left_s // 3600} h {left_s % 3600 // 60} min",
                status=429,
                code=_CODE,
                retry_after_s=left_s,
            )

    def used(self, caller: Caller, tokens: int) -> None:
        """Count the tokens of a reply that ended."""
        day = self._days.get(caller.user)
        if day is not None:  # else it has no limit; if it gets one, the ledger tells
            number = int(self._clock() // _DAY_S)
            day.number, day.tokens = number, tokens + (day.tokens if day.number == number else 0)

    async def _read(self, user: str, day: _Day, number: int) -> None:
        try:
            tokens = await self._ledger.tokens_since(user, number * _DAY_S)
        except LedgerError:  # it refuses no chat, and tells at a later one
            return
        # Another chat of the user may have asked at the same time, and have ended since: its count stays.
        if not day.is_whole and day.number == number:
            # Of replies that memory counted while the ledger failed, the ledger may have all or none: the larger number
            # counts none of them twice.
            day.tokens, day.is_whole = max(day.tokens, tokens), True

"""Tokens of a user's day: what the ledger tells at the first chat, and what memory counts from then on."""

import asyncio
from dataclasses import dataclass, field

import pytest

from openclaw_rl.errors import LedgerUnavailable, RequestError
from openclaw_rl.proxy.quotas import Quotas
from openclaw_rl.settings import UserLimits
from openclaw_rl.web.auth import Caller

DAY = 86_400.0
ANN = Caller("ann", train=True, limits=UserLimits(tokens_a_day=100, requests_at_once=1))
FREE = Caller("ann", train=True)


@dataclass
class Used:
    tokens: int = 0
    is_away: bool = False
    asked: list[tuple[str, float]] = field(default_factory=list)

    async def tokens_since(self, user: str, since: float) -> int:
        if self.is_away:
            raise LedgerUnavailable("disk full")
        self.asked.append((user, since))
        tokens = self.tokens
        await asyncio.sleep(0)
        return tokens


class Clock:
    now = 20 * DAY + 60.0

    def __call__(self) -> float:
        return self.now


async def is_refused(quotas: Quotas, caller: Caller = ANN) -> bool:
    try:
        await quotas.check_tokens(caller)
    except RequestError as error:
        assert (error.status, error.code) == (429, "rate_limit_exceeded")  # noqa: PT017
        return True
    return False


async def test_the_ledger_tells_once_what_was_used_since_midnight() -> None:
    ledger, clock = Used(90), Clock()
    quotas = Quotas(ledger, clock)
    assert not await is_refused(quotas)
    quotas.used(ANN, 9)
    assert not await is_refused(quotas)
    quotas.used(ANN, 1)
    assert await is_refused(quotas)
    assert ledger.asked == [("ann", 20 * DAY)]


async def test_the_next_day_begins_at_zero_and_the_refusal_tells_when() -> None:
    ledger, clock = Used(100), Clock()
    quotas = Quotas(ledger, clock)
    with pytest.raises(RequestError, match=r"used 100 tokens today; the limit is 100 a day.* in 23 h 59 min") as said:
        await quotas.check_tokens(ANN)
    assert said.value.retry_after_s == DAY - 60
    clock.now += DAY
    assert not await is_refused(quotas)
    quotas.used(ANN, 99)
    assert not await is_refused(quotas)
    clock.now += DAY
    quotas.used(ANN, 100)  # it began before midnight
    assert await is_refused(quotas)


async def test_chats_that_ask_at_once_lose_no_count() -> None:
    quotas = Quotas(Used(60), Clock())

    async def chat() -> None:
        await quotas.check_tokens(ANN)
        quotas.used(ANN, 20)

    await asyncio.gather(chat(), chat())
    assert await is_refused(quotas)


async def test_without_a_limit_no_chat_asks_the_ledger_and_a_later_limit_counts_all() -> None:
    ledger = Used(0)
    quotas = Quotas(ledger, Clock())
    for _ in range(3):
        await quotas.check_tokens(FREE)
        quotas.used(FREE, 50)
    assert ledger.asked == []
    ledger.tokens = 150
    assert await is_refused(quotas)


async def test_a_ledger_that_fails_refuses_no_chat_of_its_own_and_tells_at_a_later_one() -> None:
    ledger = Used(90, is_away=True)
    quotas = Quotas(ledger, Clock())
    assert not await is_refused(quotas)
    quotas.used(ANN, 9)
    ledger.is_away = False
    assert not await is_refused(quotas)
    quotas.used(ANN, 10)
    assert await is_refused(quotas), "the 90 tokens before the fault count"
    assert ledger.asked == [("ann", 20 * DAY)]


async def test_memory_counts_while_the_ledger_fails() -> None:
    ledger, clock = Used(is_away=True), Clock()
    quotas = Quotas(ledger, clock)
    assert not await is_refused(quotas)
    quotas.used(ANN, 100)
    assert await is_refused(quotas)
    ledger.is_away = False  # it recorded nothing meanwhile
    assert await is_refused(quotas)
    clock.now += DAY
    assert not await is_refused(quotas)


def test_a_place_is_free_again_however_its_request_ends() -> None:
    quotas = Quotas(Used(), Clock())

    def fails() -> None:
        with quotas.running(ANN):
            with pytest.raises(RequestError), quotas.running(ANN):
                pass
            with quotas.running(Caller("bob", train=True, limits=ANN.limits)):
                raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fails()

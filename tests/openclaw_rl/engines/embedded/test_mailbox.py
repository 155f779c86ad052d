import asyncio

import pytest

from openclaw_rl.engines.embedded.jobs import Mailbox
from openclaw_rl.errors import EngineGone


async def test_what_is_called_runs_in_order_where_the_mail_is_read():
    mailbox, seen = Mailbox(), []
    mailbox.post(lambda: seen.append("posted"))
    calling = asyncio.create_task(mailbox.call(lambda: seen.append("called") or "answer"))
    await asyncio.sleep(0)
    await asyncio.to_thread(mailbox.read, wait=False)
    assert await calling == "answer"
    assert seen == ["posted", "called"]


async def test_an_exception_comes_back_to_the_caller_and_the_rest_goes_on():
    mailbox = Mailbox()
    failing = asyncio.create_task(mailbox.call(lambda: 1 // 0))
    fine = asyncio.create_task(mailbox.call(lambda: 2))
    await asyncio.sleep(0)
    mailbox.read(wait=False)
    with pytest.raises(ZeroDivisionError):
        await failing
    assert await fine == 2


async def test_a_caller_who_left_is_skipped():
    mailbox, seen = Mailbox(), []
    calling = asyncio.create_task(mailbox.call(lambda: seen.append("ran")))
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    mailbox.read(wait=False)
    assert seen == []


async def test_a_closed_mailbox_answers_those_who_wait_and_those_who_come():
    mailbox = Mailbox()
    waiting = asyncio.create_task(mailbox.call(lambda: None))
    await asyncio.sleep(0)
    mailbox.close()
    mailbox.post(lambda: None)
    for call in (waiting, mailbox.call(lambda: None)):
        with pytest.raises(EngineGone):
            await call

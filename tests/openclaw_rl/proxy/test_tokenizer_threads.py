"""The tokenizer library runs in the main thread, event loops and two more threads only."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from openclaw_rl.proxy.tokenizer import TokenizerThreads


def test_other_threads_share_two() -> None:
    few = TokenizerThreads()
    all_asked = threading.Barrier(6)

    def ask() -> tuple[int, int]:
        all_asked.wait(30)
        return threading.get_ident(), few.run(threading.get_ident)

    with ThreadPoolExecutor(6) as pool:
        pairs = [future.result() for future in [pool.submit(ask) for _ in range(6)]]
    assert len({asked for asked, _ in pairs}) == 6
    assert len({worked for _, worked in pairs}) <= 2
    assert {asked for asked, _ in pairs}.isdisjoint(worked for _, worked in pairs)


def test_the_main_thread_and_event_loops_work_where_they_are() -> None:
    few = TokenizerThreads()
    assert few.run(threading.get_ident) == threading.get_ident()

    async def ask() -> bool:
        return few.run(threading.get_ident) == threading.get_ident()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, ask()).result()


def test_what_work_raises_comes_back() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(ZeroDivisionError):
        pool.submit(TokenizerThreads().run, lambda: 1 // 0).result()

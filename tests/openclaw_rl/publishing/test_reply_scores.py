"""Log-probs that the gate asks for: few calls at once, and none twice."""

import asyncio
from functools import partial

import pytest

from openclaw_rl.publishing.reply_scores import AT_ONCE, Remembered, few_at_once


async def test_a_figure_is_taken_once_while_gates_ask_for_it_and_again_after_one_that_did_not() -> None:
    asked = []

    async def score(number: int, prompt: tuple[int, ...], reply: tuple[int, ...]) -> tuple[float, ...]:
        asked.append((number, prompt, reply))
        return tuple(float(-number - token) for token in reply)

    remembered = Remembered()
    for _ in range(3):
        remembered.next_gate()
        assert await remembered.of(2, (1,), (3, 4), score) == (-5.0, -6.0)
        assert await remembered.of(0, (1,), (3, 4), score) == (-3.0, -4.0)
        assert await remembered.of(0, (1, 3), (4,), score) == (-4.0,)  # the same ids, cut elsewhere
    assert len(asked) == 3
    remembered.next_gate()
    remembered.next_gate()
    await remembered.of(2, (1,), (3, 4), score)
    assert len(asked) == 4


async def test_preparations_without_a_gate_keep_no_more_than_the_last_two_asked_for() -> None:
    asked = []

    async def score(number: int, prompt: tuple[int, ...], reply: tuple[int, ...]) -> tuple[float, ...]:
        asked.append(number)
        return (0.0,) * len(reply)

    remembered = Remembered()
    remembered.next_preparation()
    await remembered.of(1, (1,), (3,), score)
    remembered.next_gate()
    remembered.next_preparation()  # of the next gate: what the last one asked for is known
    await remembered.of(1, (1,), (3,), score)
    assert asked == [1]
    for number in (2, 3, 4):
        remembered.next_preparation()
        await remembered.of(number, (1,), (3,), score)
    assert len(remembered._last) + len(remembered._present) == 2
    await remembered.of(3, (1,), (3,), score)
    assert asked == [1, 2, 3, 4]


async def test_the_first_call_runs_alone_and_then_few_at_once_in_order() -> None:
    running, most, done = 0, 0, []

    async def call(number: int) -> int:
        nonlocal running, most
        assert number == 0 or 0 in done
        running += 1
        most = max(most, running)
        for _ in range(3 + number % 2):
            await asyncio.sleep(0)
        running -= 1
        done.append(number)
        return number

    assert await few_at_once([partial(call, number) for number in range(12)]) == list(range(12))
    assert most == AT_ONCE
    assert await few_at_once([]) == []


async def test_the_first_failure_is_raised_as_it_is_and_ends_the_other_calls() -> None:
    cancelled = []

    async def call(number: int) -> int:
        if number == 2:
            raise KeyError(number)
        try:
            if number:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return number

    with pytest.raises(KeyError):
        await few_at_once([partial(call, number) for number in range(4)])
    assert cancelled == [1, 3]

import asyncio
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.engines.embedded.kv_cache import BlockKV, DecodeBatch

LAYERS, HEADS, WIDTH = 2, 3, 4


def held(length: int, mark: float) -> BlockKV:
    """A sequence of that length whose keys and values say whose they are."""
    kv = BlockKV.empty(LAYERS, HEADS, WIDTH, torch.device("cpu"))
    kv.reserve(length)
    kv.keys[:, :, :length], kv.values[:, :, :length] = mark, -mark
    kv.length = length
    return kv


def sits(seats: DecodeBatch, at: int, kv: BlockKV) -> bool:
    return kv.keys.data_ptr() == seats.blocks[:, 0, at].data_ptr()


def is_whole(kv: BlockKV, mark: float) -> bool:
    keys, values = kv.keys[:, :, : kv.length], kv.values[:, :, : kv.length]
    return bool((keys == mark).all() and (values == -mark).all())


def make_seats(count: int) -> DecodeBatch:
    return DecodeBatch(count, layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH)


@given(st.lists(st.sets(st.integers(0, 7), max_size=8), min_size=1, max_size=12), st.integers(2, 5))
def test_whoever_comes_and_goes_all_keep_what_they_hold_and_the_first_seats_are_taken(steps, count):
    seats = make_seats(count)
    everybody = [held(20 + number, number + 1) for number in range(8)]
    for chosen in steps:
        seated = seats.seat([everybody[number] for number in sorted(chosen)])
        assert len(seated) == (min(len(chosen), count) if len(chosen) > 1 else 0)
        assert {id(kv) for kv in seated} <= {id(everybody[number]) for number in chosen}
        assert all(sits(seats, at, kv) for at, kv in enumerate(seated))
        assert all(is_whole(kv, number + 1) for number, kv in enumerate(everybody))


def test_who_sits_stays_where_it_is():
    seats = make_seats(4)
    a, b, c, d = (held(10, mark) for mark in range(4))
    assert seats.seat([a, b, c]) == [a, b, c]
    assert seats.seat([d, c, a]) == [a, d, c]  # the newcomer takes the free seat
    assert seats.seat([c, a]) == [a, c]  # and the last one fills a gap


def test_a_text_of_another_length_goes_alone():
    seats = make_seats(4)
    short = [held(10, mark) for mark in range(3)]
    assert seats.seat([*short, held(500, 9)]) == short


def test_a_text_that_outgrows_its_seat_moves_out_whole():
    seats = make_seats(2)
    a, b = held(seats.capacity - 1, 1), held(seats.capacity - 1, 2)
    assert seats.seat([a, b]) == [a, b]
    a.reserve(seats.capacity)
    a.length = seats.capacity
    a.keys[:, :, -1], a.values[:, :, -1] = 1, -1
    assert seats.seat([a, b]) == []
    assert is_whole(a, 1)
    assert is_whole(b, 2)


def test_what_nobody_wants_any_more_is_not_copied_out():
    seats = make_seats(2)
    a, b, c = (held(10, mark) for mark in range(3))
    seats.seat([a, b])
    del b
    assert seats.seat([a, c]) == [a, c]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
async def test_replies_that_come_and_go_are_exact(architecture, make_tiny, start_engine):
    """Several turns each, of all lengths, with and without an adapter: they sit, leave, and come back."""
    tiny = make_tiny(architecture)
    async with start_engine(tiny.folder, max_running=6) as engine:
        loaded = engine.runner.load_adapter("one", tiny.adapters["one"])

        async def talk(number: int) -> float:
            numbers, adapter = random.Random(number), loaded if number % 3 == 0 else None
            ids, worst = [numbers.randrange(3, 320) for _ in range(numbers.randrange(5, 60))], 0.0
            for turn in range(3):
                job = await engine.generate(ids, 3 + (5 * number + 7 * turn) % 23, adapter=adapter)
                ids = job.prompt + job.output
                worst = max(worst, tiny.off("one" if adapter else None, ids, job.log_probs))
                ids = ids + [numbers.randrange(3, 320) for _ in range(9)]
            return worst

        assert max(await asyncio.gather(*(talk(number) for number in range(9)))) <= 4.0  # plain forwards' rounding

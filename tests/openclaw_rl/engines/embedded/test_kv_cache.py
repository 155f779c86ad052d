import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.engines.embedded.kv_cache import CacheKey, PrefixCache, common_prefix
from openclaw_rl.engines.embedded.runner import Adapter

BASE = CacheKey(None, None)


class FakeKV:
    def __init__(self, length: int = 0) -> None:
        self.length = length


class FakeRunner:
    """KV that only knows its length."""

    vocab_size = context_length = 1 << 20

    def __init__(self, *, can_share: bool = True) -> None:
        self.can_share, self.copies = can_share, 0

    def new_kv(self) -> FakeKV:
        return FakeKV()

    def copy_kv(self, kv: FakeKV, length: int) -> FakeKV:
        assert length <= kv.length
        self.copies += 1
        return FakeKV(length)

    def truncate_kv(self, kv: FakeKV, length: int) -> None:
        assert length <= kv.length
        kv.length = length


def run(cache: PrefixCache, key: CacheKey, tokens: list[int], limit: int | None = None):
    """A request: takes its place, computes what is missing. Returns the place, and how much was cached."""
    sequence = cache.take(key, tokens, len(tokens) - 1 if limit is None else limit)
    cached = len(sequence.tokens)
    assert sequence.tokens == tokens[:cached]
    assert sequence.kv.length == cached
    sequence.tokens.extend(tokens[cached:])
    sequence.kv.length = len(tokens)
    return sequence, cached


@given(st.lists(st.integers(0, 1), max_size=700), st.lists(st.integers(0, 1), max_size=700), st.integers(0, 700))
def test_common_prefix_is_what_a_loop_finds(a, b, shared):
    b = a[:shared] + b
    at = 0
    while at < min(len(a), len(b)) and a[at] == b[at]:
        at += 1
    assert common_prefix(a, b) == at


def test_the_next_turn_takes_over_without_a_copy():
    runner = FakeRunner()
    cache = PrefixCache(runner, budget=1000, spare=8)
    first, cached = run(cache, BASE, list(range(50)))
    assert cached == 0
    cache.give_back(first)
    second, cached = run(cache, BASE, [*range(50), 7, 8, 9])
    assert (cached, second is first, runner.copies) == (50, True, 0)


def test_what_would_lose_more_than_the_spare_is_copied():
    runner = FakeRunner()
    cache = PrefixCache(runner, budget=1000, spare=8)
    long, _ = run(cache, BASE, list(range(50)))
    cache.give_back(long)
    branch, cached = run(cache, BASE, [*range(30), 99, 98])
    assert (cached, branch is long, runner.copies) == (30, False, 1)
    assert len(long.tokens) == 50


def test_a_running_sequence_is_shared_by_copy():
    runner = FakeRunner()
    cache = PrefixCache(runner, budget=1000, spare=8)
    run(cache, BASE, list(range(50)))
    _, cached = run(cache, BASE, list(range(50)))
    assert (cached, runner.copies) == (49, 1)


def test_keys_never_share():
    cache = PrefixCache(FakeRunner(), budget=1000, spare=8)
    one, again = Adapter("policy", object()), Adapter("policy", object())
    keys = [BASE, CacheKey("v1", None), CacheKey(None, one), CacheKey(None, again), CacheKey("v1", one)]
    for key in keys:
        sequence, cached = run(cache, key, list(range(20)))
        assert cached == 0
        cache.give_back(sequence)
    for key in keys:
        assert run(cache, key, list(range(20)))[1] == 19


def idle_tokens(cache):
    return sum(len(s.tokens) for held in cache._held.values() for s in held if not s.is_busy)


def test_the_limit_is_kept():
    cache = PrefixCache(FakeRunner(), budget=1000, spare=100)
    cache.give_back(run(cache, BASE, list(range(50)))[0])
    assert run(cache, BASE, list(range(50)), limit=12)[1] == 12


def test_the_least_recently_used_is_forgotten_first():
    cache = PrefixCache(FakeRunner(), budget=100, spare=4)
    for start in (0, 1000, 2000):
        cache.give_back(run(cache, BASE, list(range(start, start + 40)))[0])
        if start == 1000:  # the first is used again
            cache.give_back(run(cache, BASE, list(range(40)))[0])
    assert idle_tokens(cache) == 80
    assert run(cache, BASE, list(range(40)))[1] == 39
    assert run(cache, BASE, list(range(1000, 1040)))[1] == 0


def test_clear_spares_what_runs_and_other_adapters():
    cache = PrefixCache(FakeRunner(), budget=1000, spare=4)
    adapter = Adapter("a", object())
    busy, _ = run(cache, BASE, list(range(20)))
    cache.give_back(run(cache, CacheKey(None, adapter), list(range(20)))[0])
    cache.give_back(run(cache, CacheKey("x", None), list(range(20)))[0])
    cache.clear(adapter=adapter)
    assert idle_tokens(cache) == 20
    cache.clear()
    assert idle_tokens(cache) == 0
    cache.give_back(busy)
    assert idle_tokens(cache) == 20


def test_a_runner_that_cannot_share_keeps_nothing():
    cache = PrefixCache(FakeRunner(can_share=False), budget=1000, spare=4)
    cache.give_back(run(cache, BASE, list(range(20)))[0])
    assert idle_tokens(cache) == 0
    assert run(cache, BASE, list(range(20)))[1] == 0


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.booleans()), max_size=40),
    st.integers(0, 120),
)
def test_any_history_keeps_tokens_and_kv_together_and_the_budget(requests, budget):
    cache = PrefixCache(FakeRunner(), budget=budget, spare=5)
    running = []
    for tokens, ends in requests:
        running.append(run(cache, BASE, tokens)[0])
        if ends:
            cache.give_back(running.pop(0))
        assert idle_tokens(cache) <= budget
        for sequence in running:
            assert sequence.is_busy
            assert sequence.kv.length == len(sequence.tokens)


@pytest.mark.parametrize("budget", [0, 10])
def test_a_small_budget_only_costs_recomputation(budget):
    cache = PrefixCache(FakeRunner(), budget=budget, spare=4)
    cache.give_back(run(cache, BASE, list(range(20)))[0])
    assert run(cache, BASE, list(range(20)))[1] == 0

"""The stage of a pool: waits over an event, and what the prefix-cache hits must show."""

from itertools import cycle
from typing import Any

import pytest

from benchmarks.chat_load import Reply
from gpu import pool_chats, pool_hits, random_routes
from openclaw_rl.engines.client import HttpEngine
from openclaw_rl.engines.pool import PooledEngine
from openclaw_rl.errors import EngineGone
from openclaw_rl.settings import EngineSettings


def test_the_longest_waits_over_an_event_are_told_apart_from_the_calm() -> None:
    replies = [
        Reply(started=0.0, token_times=[0.1, 0.2, 0.3], finish_reason="stop"),
        Reply(started=9.0, token_times=[9.1, 10.6, 10.7], finish_reason="stop"),
        Reply(started=10.2, token_times=[10.9, 11.0], finish_reason="stop"),
        Reply(started=30.0, error="503"),
    ]
    found = pool_chats.figures_of(replies, {"kill": (10.0, 10.5), "swap": (20.0, 21.0)})
    assert found["kill"] == {"chats": 2, "longest gap s": 1.5, "longest first token s": 0.7}
    assert found["swap"] == {"chats": 0, "longest gap s": 0.0, "longest first token s": 0.0}
    assert found["longest wait for a token in the calm, p50/p99/max s"][2] == 0.1
    assert (found["replies"], found["refused or cut"]) == (4, {"503": 1})


def test_a_kill_of_an_idle_engine_and_a_return_to_no_calls_prove_nothing() -> None:
    assert pool_chats.killed_findings("kill", 5, 3) == []
    assert len(pool_chats.killed_findings("kill", 0, 0)) == 2


def test_a_chat_that_waits_over_a_roll_is_a_finding() -> None:
    chats: dict[str, Any] = {"replies": 4, "pin 1": {"longest gap s": 0.1, "chats": 4}}
    chats["kill of engine 2"] = {"longest gap s": 9.0, "chats": 4}
    assert pool_chats.roll_findings(chats) == []
    chats["versions of the trainer"] = {"longest gap s": 1.2, "chats": 4}
    assert pool_chats.roll_findings(chats) == ["versions of the trainer: a chat had a gap of 1.2 s"]


def test_a_roll_that_no_chat_met_proves_nothing() -> None:
    assert pool_chats.roll_findings({"pin 1": {"longest gap s": 0.0, "chats": 0}}) == ["pin 1: no chat ran over it"]


def hits(kept: float, moved: float, one: float, error: str | None = None) -> dict[str, Any]:
    rates = {"with affinity": kept, "at random": moved, "one engine": one}
    return {name: {"hit rate": rate, "errors": [error] if error else []} for name, rate in rates.items()}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (hits(0.9, 0.5, 0.95), []),
        (hits(0.8, 0.5, 0.95), ["with affinity the pool finds too few prefixes"]),
        (hits(0.9, 0.9, 0.9), ["affinity finds no more prefixes than chance"]),
        (hits(0.0, 0.0, 0.0), ["with affinity the pool", "affinity finds no more"]),
        (hits(0.9, 0.5, 0.9, "503"), ["with affinity: ['503']", "at random: ", "one engine: "]),
    ],
)
def test_affinity_must_find_nearly_what_one_engine_finds_and_more_than_none(
    found: dict[str, Any], says: list[str]
) -> None:
    findings = pool_hits.findings(found)
    assert len(findings) == len(says)
    assert all(finding.startswith(word) for finding, word in zip(findings, says, strict=True))


async def test_at_random_a_call_meets_the_drawn_engine_and_never_one_it_has_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = [HttpEngine(f"http://127.0.0.1:{port}", settings=EngineSettings()) for port in (1, 2)]
    pool = PooledEngine(engines, change_s=1)
    drawn = cycle(pool._members)
    monkeypatch.setattr(random_routes.random, "choice", lambda _: next(drawn))
    try:
        first, second = pool._members
        first.is_in = second.is_in = True
        met = [random_routes.at_random(pool, "a conversation", None, ()) for _ in range(4)]
        assert met == [first, second, first, second]
        assert [random_routes.at_random(pool, "a conversation", None, {first}) for _ in range(2)] == [second, second]
        with pytest.raises(EngineGone):
            random_routes.at_random(pool, None, None, {first, second})
    finally:
        await pool.aclose()

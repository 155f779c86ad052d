"""Throughput of the proxy beside its engine: enough bursts, in an order that favours neither."""

import asyncio
from typing import Any

import pytest

from gpu import overhead


async def test_each_way_has_bursts_in_a_mixed_order_and_its_spread_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def ask(url: str, body: dict[str, Any]) -> tuple[float, int]:
        way = "with log-probs" if "logprobs" in body else url
        if not asked or asked[-1] != way:
            asked.append(way)
        await asyncio.sleep(0.001)
        return 0.0, 1

    monkeypatch.setattr(overhead, "_ask", ask)
    found = await overhead._throughput("proxy", "engine", 2, burst_s=0.0)
    assert found["bursts of each"] == overhead.BURSTS >= 5
    assert asked[:6] != ["engine", "with log-probs", "proxy"] * 2
    for way in ("SGLang", "SGLang with log-probs", "proxied"):
        rate = found["tokens/s"][way]
        assert 0 < rate["least"] <= rate["median"] <= rate["most"]
    assert {"proxied / SGLang", "proxied / SGLang with log-probs"} < found.keys()
    assert overhead.BURST_S >= 10

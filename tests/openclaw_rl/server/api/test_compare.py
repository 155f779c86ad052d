"""`/v1/admin/compare`: a prompt to several versions, over a fake engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from openclaw_rl.engines.admission import VersionUse
from openclaw_rl.errors import LedgerError
from openclaw_rl.server.api import compare
from openclaw_rl.server.api.app import http_app
from openclaw_rl.server.api.compare import Comparison, add_compare_route
from openclaw_rl.testing import FakeEngine
from openclaw_rl.testing.fake_engine import Scripted


class Words:
    end_ids = frozenset({2})
    context_length = 100

    async def render_async(self, messages: Sequence[Any]) -> Any:
        return SimpleNamespace(ids=tuple(map(ord, messages[0].text())))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Lender:
    def __init__(self) -> None:
        self.lent: list[int] = []
        self.loads_s = 0.0

    @asynccontextmanager
    async def lend(self, weight_version: int) -> AsyncIterator[VersionUse]:
        if weight_version > 1:
            raise LedgerError(f"no version {weight_version}")
        await asyncio.sleep(self.loads_s)
        self.lent.append(weight_version)
        yield VersionUse(weight_version, None, f"v{weight_version}")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def lender() -> Lender:
    return Lender()


@pytest.fixture
async def client(engine: FakeEngine, lender: Lender) -> AsyncIterator[httpx.AsyncClient]:
    app, router = http_app(), APIRouter()
    add_compare_route(router, Comparison(lender, engine, Words()))
    app.include_router(router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client


async def test_each_version_answers_the_prompt_greedily_and_behind_the_chats(client, engine):
    engine.script(Scripted(tuple(map(ord, "old"))), Scripted(tuple(map(ord, "new!"))))
    answer = await client.post("/v1/admin/compare", json={"prompt": "hi", "versions": [0, 1]})
    assert answer.json()["replies"] == [
        {"weight_version": 0, "text": "old", "tokens": 3, "is_cut": False},
        {"weight_version": 1, "text": "new!", "tokens": 4, "is_cut": False},
    ]
    assert [(call.input_ids, call.extra_key, call.priority) for call in engine.calls] == [
        ([104, 105], "v0", 0),
        ([104, 105], "v1", 0),
    ]
    assert {call.sampling_params.temperature for call in engine.calls} == {0.0}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "hi", "versions": [7]}, 409),
        ({"prompt": "", "versions": [0]}, 422),
        ({"prompt": "hi", "versions": []}, 422),
        ({"prompt": "hi", "versions": [0] * 5}, 422),
        ({"prompt": "x" * 100, "versions": [0]}, 400),
    ],
)
async def test_what_cannot_be_compared_is_told(client, body, status):
    answer = await client.post("/v1/admin/compare", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_a_reply_that_is_longer_than_asked_for_is_told_as_cut(client, engine):
    engine.script(Scripted(tuple(map(ord, "a long reply"))))
    answer = await client.post("/v1/admin/compare", json={"prompt": "hi", "versions": [0], "max_tokens": 6})
    assert answer.json()["replies"] == [{"weight_version": 0, "text": "a long", "tokens": 6, "is_cut": True}]


async def test_one_comparison_runs_at_a_time(client, engine):
    engine.script(Scripted((104,), hold_after=0))
    body = {"prompt": "hi", "versions": [0]}
    first = asyncio.create_task(client.post("/v1/admin/compare", json=body))
    while not engine.holding:
        await asyncio.sleep(0)
    assert (await client.post("/v1/admin/compare", json=body)).status_code == 409
    engine.release()
    assert (await first).status_code == 200


async def test_a_reply_that_a_swap_cut_is_not_shown_as_its_versions(client, engine):
    engine.script(Scripted((104,), finish="abort"))
    answer = await client.post("/v1/admin/compare", json={"prompt": "hi", "versions": [0]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "weights_changed")


async def test_the_deadline_ends_no_load(client, engine, lender, monkeypatch):
    """An adapter whose load is cut would stay on the engine, unknown to the publisher."""
    monkeypatch.setattr(compare, "_DEADLINE_S", 0.01)
    lender.loads_s = 0.05
    answer = await client.post("/v1/admin/compare", json={"prompt": "hi", "versions": [0]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
    assert lender.lent == [0]

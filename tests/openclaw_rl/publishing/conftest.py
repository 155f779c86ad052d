"""A publisher that runs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from publishing import World

from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.settings import PublisherSettings, TrainingSettings
from openclaw_rl.testing import FakeEngine


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    settings = PublisherSettings(**getattr(request, "param", {}))
    identity = Identity("base", "tokenizer", "tiny")
    ledger = await Ledger.open(tmp_path / "ledger.sqlite3", identity=identity, training=TrainingSettings(min_batch=1))
    world = World(ledger, FakeEngine(), tmp_path, settings)
    await world.publisher.restore()
    task = asyncio.create_task(world.publisher.run())
    yield world
    assert not task.done(), task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await ledger.aclose()

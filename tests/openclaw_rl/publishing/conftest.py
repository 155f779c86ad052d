"""A publisher that runs: of adapters, and of full weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from publishing import World

from openclaw_rl.ledger import Identity, Ledger
from openclaw_rl.settings import PublisherSettings, TrainingSettings
from openclaw_rl.testing import FakeEngine
from openclaw_rl.types import WeightKind


@asynccontextmanager
async def running(folder: Path, kind: WeightKind, settings: PublisherSettings) -> AsyncIterator[World]:
    identity = Identity("base", "tokenizer", "tiny", kind)
    ledger = await Ledger.open(folder / "ledger.sqlite3", identity=identity, training=TrainingSettings(min_batch=1))
    world = World(ledger, FakeEngine(), folder, settings)
    await world.publisher.restore()
    task = asyncio.create_task(world.publisher.run())
    yield world
    assert not task.done(), task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await ledger.aclose()


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with running(tmp_path, WeightKind.LORA, PublisherSettings(**getattr(request, "param", {}))) as world:
        yield world


@pytest.fixture
async def full_world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path, WeightKind.FULL, PublisherSettings()) as world:
        yield world

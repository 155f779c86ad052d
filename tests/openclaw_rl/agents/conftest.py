"""Real sandboxes of bubblewrap. A machine without it fails these tests with the words that say what to install."""

from collections.abc import AsyncIterator

import pytest

from openclaw_rl.agents.sandbox import Limits, Sandboxes

LIMITS = Limits(processes=40, file_mb=50, disk_mb=200, output_kb=16, flood_mb=2, command_s=20)


@pytest.fixture
async def sandboxes() -> AsyncIterator[Sandboxes]:
    opened = await Sandboxes.choose("bubblewrap", LIMITS)
    yield opened
    await opened.close()

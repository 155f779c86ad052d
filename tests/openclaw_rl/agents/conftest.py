"""Real sandboxes of bubblewrap. A machine without it fails these tests with the words that say what to install."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from fake_episodes import FakeEpisodes

from openclaw_rl.agents.api import EpisodesApi, Member
from openclaw_rl.agents.environment import Environment, Outcome, Task
from openclaw_rl.agents.episode import Episode, EpisodeLimits
from openclaw_rl.agents.sandbox import Limits, Sandboxes

LIMITS = Limits(processes=40, file_mb=50, disk_mb=200, output_kb=16, flood_mb=2, command_s=20)


@pytest.fixture
async def sandboxes() -> AsyncIterator[Sandboxes]:
    opened = await Sandboxes.choose("bubblewrap", LIMITS)
    yield opened
    await opened.close()


@pytest.fixture
async def play(sandboxes: Sandboxes) -> AsyncIterator[Callable[..., Awaitable[Outcome]]]:
    """`await play(environment, task, script, **limits)` is one episode; a script is a text, or makes it of messages."""
    fake = FakeEpisodes()

    async def opened() -> Sandboxes:
        return sandboxes

    async with httpx.AsyncClient(transport=httpx.ASGITransport(fake.app)) as client:
        api = EpisodesApi(client, "http://server")

        async def play_one(environment: Environment, task: Task, script: Any, **limits: float) -> Outcome:
            fake.script = lambda _, messages: script(messages) if callable(script) else script
            name = f"e{len(fake.episodes)}"
            base_url = await api.open(Member(name, task.id, "train"))
            bounds = EpisodeLimits(**limits)  # type: ignore[arg-type]
            episode = Episode(name, base_url, api, opened, split="train", limits=bounds, sampling={})
            return await environment.run(task, episode)

        yield play_one

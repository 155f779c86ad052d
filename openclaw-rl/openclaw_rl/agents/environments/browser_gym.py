"""MiniWoB by BrowserGym, its browser environment: its view of the page, its actions, its verdict.

Each episode has a process of its own (`browser_gym_world`), because BrowserGym holds one Playwright for a process. Both
of its browsers, the task's and the chat's, run in `browser`'s bubblewrap: pages from files, no network. Everything ends
with the runner. Needs browsergym-miniwob and miniwob (`scripts/agents/env.sh browsergym`) and Chromium. ±1.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.agents.environment import Outcome, Split, Task
from openclaw_rl.agents.environments.browser import Browser
from openclaw_rl.agents.environments.child import Child, ChildGone
from openclaw_rl.agents.environments.miniwob import PAGES, page_tasks, pages_folder
from openclaw_rl.agents.episode import Episode
from openclaw_rl.errors import EnvironmentFault

_WORLD = Path(__file__).with_name("browser_gym_world.py")
_MEMORY_MB = 1 << 24
"""Of address space. Chromium reserves terabytes of it, and uses little."""
_FILE_MB = 1024
_SYSTEM = "You use a web page to do a task. Each message shows the page. Your answer is one action and nothing else.\n"


class BrowserGym:
    """Tasks of many pages; a seed makes a task of a page."""

    needs_sandbox = True

    def __init__(
        self,
        pages: Sequence[str] = PAGES,
        train_tasks: int = 2048,
        eval_tasks: int = 200,
        seed: int = 0,
        folder: str = "",
        program: str = "",
        step_s: float = 120.0,
    ) -> None:
        """pages, folder, program: as MiniWoB's. step_s: longest time of a start or an action."""
        where = pages_folder(pages, folder)
        self._page_names, self._seed, self._step_s = list(pages), seed, step_s
        self._counts: dict[str, int] = {"train": train_tasks, "eval": eval_tasks}
        self._browser = Browser(where, width=0, height=0, program=program)  # BrowserGym sets the size

    def tasks(self, split: Split) -> Sequence[Task]:
        return page_tasks("browsergym/miniwob.", self._page_names, split, self._counts[split], self._seed)

    async def run(self, task: Task, episode: Episode) -> Outcome:
        launcher = await self._browser.launcher(await episode.open_sandboxes())
        start = {"page": task.data["page"], "seed": task.data["seed"], "launcher": str(launcher)}
        async with Child(_WORLD, memory_mb=_MEMORY_MB, file_mb=_FILE_MB) as world:
            seen = await self._ask(world, start)
            messages: list[dict[str, object]] = [{"role": "system", "content": f"{_SYSTEM}{seen['actions']}"}]
            async with episode.acting():
                while not seen["done"]:
                    messages.append({"role": "user", "content": str(seen["shown"])})
                    reply = await episode.ask(messages)
                    messages.append({"role": "assistant", "content": reply.text})
                    seen = await self._ask(world, {"action": reply.text})
        reward = float(seen["reward"])
        return Outcome(1.0 if reward >= 1 else -1.0, {"steps": float(episode.steps), "raw_reward": reward})

    async def close(self) -> None:
        await self._browser.close()

    async def _ask(self, world: Child, asked: Mapping[str, object]) -> dict[str, Any]:
        """Raises EnvironmentFault: a wrong action is none, and is told in what the page shows."""
        try:
            seen = await world.ask(asked, self._step_s)
        except ChildGone as error:
            raise EnvironmentFault(f"BrowserGym failed: {error}") from error
        if "fault" in seen:
            raise EnvironmentFault(f"BrowserGym failed: {seen['fault']}")
        return seen

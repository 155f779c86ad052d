"""The engine that a replay scores with: one that runs already, or the embedded one as a child of this process.

It holds the model that the replay trains, without an adapter: its weights are version 0, the policy the first step
starts from. It ends with the `async with`.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from openclaw_rl.children import engine_child, free_port
from openclaw_rl.data_dir import DataDir
from openclaw_rl.engines.dialect import ModelInfo
from openclaw_rl.engines.http import HttpEngine
from openclaw_rl.engines.serving import ServingVersions
from openclaw_rl.errors import EngineError
from openclaw_rl.methods.base import ScoringTools
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.rollout.asking import judge_model, renderer
from openclaw_rl.settings import Settings
from openclaw_rl.supervisor import Child

_POLL_S = 0.2


@asynccontextmanager
async def scoring_tools(settings: Settings, frontend: FrontEnd, cache: Path) -> AsyncIterator[ScoringTools]:
    """What `method.score` needs. Raises EngineError when the engine does not come up."""
    hints, scores = (asyncio.Semaphore(settings.method.score_workers) for _ in range(2))
    async with (
        _url(settings, cache) as (url, child),
        httpx.AsyncClient(trust_env=False) as client,
        asyncio.TaskGroup() as tasks,
    ):
        running = None if child is None else tasks.create_task(child.run(), name="engine")
        engine = HttpEngine(url, settings=settings.engine)
        try:
            info = await _up(engine, child, settings.engine.start_timeout_s)
            serving = ServingVersions(settings.engine.hold_s)
            serving.switch(0, None)
            yield ScoringTools(
                settings=settings.method,
                teacher=engine,
                serving=serving,
                render=renderer(frontend),
                ask=judge_model(settings.judge, engine, frontend, client=client, slots=hints),
                context_length=info.context_length or frontend.context_length,
                slots=scores,
            )
        finally:
            await engine.aclose()
            if child is not None and running is not None:
                await child.stop()
                await running


@asynccontextmanager
async def _url(settings: Settings, cache: Path) -> AsyncIterator[tuple[str, Child | None]]:
    """Where the engine is, and the child that has yet to be run when it is ours. Its files lie in a folder of its own:
    a server of this data directory has an engine too."""
    if settings.engine.url is not None:
        yield settings.engine.url, None
        return

    async def on_exit() -> None:
        """`_up` and the scoring calls notice."""

    with tempfile.TemporaryDirectory(prefix="openclaw-rl-replay-") as folder:
        (Path(folder) / "cache").symlink_to(cache)  # a model is converted once
        port = free_port()
        yield f"http://127.0.0.1:{port}", engine_child(settings, DataDir.prepare(Path(folder)), port, on_exit)


async def _up(engine: HttpEngine, child: Child | None, timeout_s: float) -> ModelInfo:
    end = time.monotonic() + timeout_s
    while not await engine.is_healthy():
        if child is not None and child.status().restarts > 2:
            raise EngineError(f"the engine does not start: {child.last_line()}")
        if time.monotonic() > end:
            raise EngineError(f"the engine did not come up within {timeout_s:g} s")
        await asyncio.sleep(_POLL_S)
    return await engine.model_info()

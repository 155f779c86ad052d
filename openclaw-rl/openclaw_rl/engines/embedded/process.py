"""The engine's composition root: loads the model, starts the model thread, listens, and stops them in order."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import structlog
import torch
import uvicorn

from openclaw_rl import doors
from openclaw_rl.c_heap import keep_large_buffers_apart
from openclaw_rl.engines.bundled import base_hash, resolve
from openclaw_rl.engines.dialect import ModelInfo
from openclaw_rl.engines.embedded.config import EngineConfig
from openclaw_rl.engines.embedded.loading import end_ids, load_runner
from openclaw_rl.engines.embedded.scheduler import Scheduler
from openclaw_rl.engines.embedded.server import Service, build_app
from openclaw_rl.engines.embedded.stopping import load_decode
from openclaw_rl.engines.embedded.wire import Limits

events = structlog.get_logger()

DRAIN_S = 30


async def serve(config: EngineConfig) -> None:
    """Until SIGTERM or SIGINT. The port file appears once the engine can serve."""
    keep_large_buffers_apart()
    resolved = await asyncio.to_thread(resolve, config.model, config.cache_dir)
    runner = await asyncio.to_thread(load_runner, resolved.folder, config.model, config.engine)
    limits = Limits(runner.vocab_size, runner.context_length, end_ids(resolved.folder), load_decode(resolved.folder))
    info = ModelInfo(
        model_path=str(resolved.folder),
        tokenizer_path=str(resolved.folder),
        weight_version="default",
        base_hash=await asyncio.to_thread(base_hash, resolved),
        context_length=runner.context_length,
    )
    scheduler = Scheduler(
        runner,
        max_running=config.engine.max_running,
        prefill_chunk=config.engine.prefill_chunk,
        cache_tokens=config.engine.cache_tokens,
    )
    app = doors.local_only(build_app(Service(scheduler, runner, limits, info)))
    with socket.socket(socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(512)
        url = f"http://{config.host}:{listener.getsockname()[1]}"
        if config.port_file:
            _announce(config.port_file, url)
        events.info("engine_ready", url=url, model=resolved.name, runner=type(runner).__name__)
        server = _Server(
            uvicorn.Config(
                app, log_level="warning", timeout_graceful_shutdown=DRAIN_S, access_log=False, lifespan="off"
            )
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.stop)
        async with asyncio.TaskGroup() as tasks:
            model = tasks.create_task(_model_thread(scheduler, config.engine.threads))
            try:
                await tasks.create_task(server.serve(sockets=[listener]))
            finally:
                scheduler.stop()
            await model


class _Server(uvicorn.Server):
    """uvicorn's own handling would end the process by the signal again, after a clean stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Finish what runs; asked twice, leave at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def _model_thread(scheduler: Scheduler, threads: int | None) -> None:
    loop = asyncio.get_running_loop()

    def run() -> None:
        # OpenMP's thread count belongs to the thread that asks.
        torch.set_num_threads(threads or os.cpu_count() or 1)
        scheduler.run(loop)

    await asyncio.to_thread(run)


def _announce(port_file: Path, url: str) -> None:
    port_file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=port_file.parent, delete=False) as file:
        json.dump({"url": url, "pid": os.getpid()}, file)
    os.replace(file.name, port_file)

"""Composition root of the engine's process: load the model, start the model thread, listen, and stop them in order."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import torch
import uvicorn

from openclaw_rl.engines.dialect import ModelInfo
from openclaw_rl.engines.embedded.config import EngineConfig
from openclaw_rl.engines.embedded.jobs import load_decode
from openclaw_rl.engines.embedded.llama_model import read_shape
from openclaw_rl.engines.embedded.llama_runner import LlamaRunner
from openclaw_rl.engines.embedded.runner import Runner
from openclaw_rl.engines.embedded.scheduler import Scheduler
from openclaw_rl.engines.embedded.server import Service, build_app
from openclaw_rl.engines.embedded.wire import Limits
from openclaw_rl.errors import SettingsError
from openclaw_rl.models.resolve import base_hash, load_pretrained, resolve
from openclaw_rl.processes.malloc import keep_large_buffers_apart
from openclaw_rl.settings import EngineSettings, ModelSettings
from openclaw_rl.web import host_guard

log = structlog.get_logger()

DRAIN_S = 30


async def serve(config: EngineConfig) -> None:
    """Serve until SIGTERM or SIGINT. Write the port file once the engine can serve."""
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
    app = host_guard.local_only(build_app(Service(scheduler, runner, limits, info)))
    with socket.socket(socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(512)
        url = f"http://{config.host}:{listener.getsockname()[1]}"
        if config.port_file:
            _announce(config.port_file, url)
        log.info("engine_ready", url=url, model=resolved.name, runner=type(runner).__name__)
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


def load_runner(folder: Path, model: ModelSettings, engine: EngineSettings) -> Runner:
    """Return the fast runner if it knows the architecture, else the runner of transformers' own model."""
    length = context_length(folder, model)
    device = torch.device(engine.device)
    shape = read_shape(folder)
    if shape is not None:
        on_cpu = device.type == "cpu"
        return LlamaRunner(
            folder,
            shape,
            context_length=length,
            device=device,
            threads=(engine.threads or os.cpu_count() or 1) if on_cpu else 1,
            seats=engine.max_running if on_cpu else 0,
        )
    # Imported here: transformers' model code costs seconds and memory that the fast runner does without.
    from openclaw_rl.engines.embedded.transformers_runner import TransformersRunner

    loaded = load_pretrained(folder, dtype=torch.float32)
    return TransformersRunner(loaded.to(device).eval(), context_length=length)


def context_length(folder: Path, model: ModelSettings) -> int:
    """Return the context length, prompt and reply together: the model's own, or the smaller one of the settings."""
    config = _read(folder / "config.json")
    own = config.get("max_position_embeddings") or config.get("n_positions")
    own = own or config.get("text_config", {}).get("max_position_embeddings")
    if own is None and model.context_length is None:
        raise SettingsError(f"{folder}/config.json states no context length: set model.context_length")
    if own is not None and model.context_length is not None and model.context_length > own:
        raise SettingsError(f"model.context_length {model.context_length} is more than the model's own {own}")
    return int(model.context_length or own)


def end_ids(folder: Path) -> frozenset[int]:
    """Return the tokens that end a reply: those of generation config, config and tokenizer together."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read(folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = _read(folder / "tokenizer.json").get("added_tokens", []) if text else []
    return frozenset(found | {entry["id"] for entry in added if entry["content"] == text})


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes()) if file.is_file() else {}


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would end the process by the signal again, after a clean stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Finish the running replies and exit; exit at once if called twice."""
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

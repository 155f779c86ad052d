"""The processes a server starts: an engine (embedded, or SGLang) and the local trainer. Ours get one private JSON file
each, and no environment.
"""

import os
import socket
from collections.abc import Awaitable, Callable

from openclaw_rl.data_dir import DataDir, write_json
from openclaw_rl.engines.sglang import launch
from openclaw_rl.models.resolve import model_display_name, tokenizer_folder
from openclaw_rl.processes.command import ChildCommand
from openclaw_rl.processes.supervisor import Child
from openclaw_rl.settings import Settings


def free_port() -> int:
    """A free loopback port. Kept for the life of the server, so that a restarted engine has the same URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def engine_child(settings: Settings, data: DataDir, port: int, on_exit: Callable[[], Awaitable[None]]) -> Child:
    config = data.run / "engine.json"
    write_json(
        config,
        {
            "host": "127.0.0.1",
            "port": port,
            "model": settings.model.model_dump(mode="json"),
            "engine": settings.engine.model_dump(mode="json"),
            "cache_dir": str(data.cache),
            "port_file": str(data.run / "engine.port.json"),
            "log_level": settings.log_level,
        },
    )
    return Child(
        "engine",
        ChildCommand("openclaw_rl.engines.embedded", ("--config", str(config)), settings.engine.python),
        log_file=data.logs / "engine.log",
        on_exit=on_exit,
    )


def trainer_child(settings: Settings, data: DataDir, *, url: str, token: str, base_hash: str) -> Child:
    config = data.run / "trainer.json"
    write_json(
        config,
        {
            "url": url,
            "token": token,
            "data_dir": str(data.root),
            "cache_dir": str(data.cache),
            "base_hash": base_hash,
            "weights": settings.training.weights,
            "model": settings.model.model_dump(mode="json"),
            "trainer": settings.trainer.model_dump(mode="json"),
            "method": settings.method.model_dump(mode="json"),
            "log_level": settings.log_level,
            "parent_pid": os.getpid(),
        },
    )
    return Child(
        "trainer",
        ChildCommand("openclaw_rl.trainers.local", ("--config", str(config)), settings.trainer.python),
        log_file=data.logs / "trainer.log",
    )


def sglang_engine_child(settings: Settings, data: DataDir, port: int, on_exit: Callable[[], Awaitable[None]]) -> Child:
    """SGLang for this model and these adapters. Blocks: a first conversion of the model takes its time."""
    engine = settings.engine
    arguments = launch.argv(
        launch.look(engine.python),
        engine,
        folder=tokenizer_folder(settings.model, data.cache),
        name=settings.server.served_model_name or model_display_name(settings.model),
        port=port,
        context_length=settings.model.context_length,
        adapters=launch.Adapters.of(settings.trainer, settings.publisher)
        if settings.training.weights == "lora"
        else None,
        dtype=launch.dtype_of(engine, settings.model),
    )
    return launch.sglang_child(arguments, engine, log_file=data.logs / "engine.log", on_exit=on_exit)

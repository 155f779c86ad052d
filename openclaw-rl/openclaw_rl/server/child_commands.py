"""The server's child processes: the engines, of the kind that `engine.kind` names, and the local trainer."""

import os

from openclaw_rl.data_dir import DataDir, write_json
from openclaw_rl.engines.kind import EngineKind, OnExit
from openclaw_rl.errors import SettingsError
from openclaw_rl.processes.command import ChildCommand, free_port
from openclaw_rl.processes.supervisor import Child
from openclaw_rl.settings import Settings


def replica_child(
    kind: EngineKind, settings: Settings, data: DataDir, number: int, on_exit: OnExit
) -> tuple[str, Child]:
    """Return the URL and the process of one of `engine.replicas`. Blocks. Raises SettingsError."""
    port = free_port()
    return f"http://127.0.0.1:{port}", kind.replica(settings, data, port, on_exit, number)


def engine_child(kind: EngineKind, settings: Settings, data: DataDir, on_exit: OnExit) -> tuple[str, Child | None]:
    """Return the engine's URL, and the child process that has to run there; None: the engine runs already.

    Blocks. Raises SettingsError.
    """
    port = free_port()
    child = kind.child(settings, data, port, on_exit)
    url = settings.engine.url if child is None else f"http://127.0.0.1:{port}"
    if url is None:
        raise SettingsError(f"engine.url is needed: engine.kind {settings.engine.kind!r} starts no engine")
    return url, child


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

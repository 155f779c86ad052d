"""The local trainer's process: `python -m openclaw_rl.trainers.local --config FILE`.

Its composition root reads one JSON file, takes the trainer's lock in the data directory, lowers its own priority, loads
the base model and runs the loop.

On SIGTERM or SIGINT it breaks off the running pass, gives the batch back and exits with 0. Exit 2: it cannot start, and
one line names the reason. Exit 75: a step hung.
"""

import argparse
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from openclaw_rl.data_dir import DataDir
from openclaw_rl.errors import OpenClawRLError, SettingsError, TrainerError
from openclaw_rl.ledger.pictures import folder_of
from openclaw_rl.log import configure as configure_log
from openclaw_rl.methods.base import load_method
from openclaw_rl.settings import AnyMethodSettings, ModelSettings, TrainerSettings, default_method_settings
from openclaw_rl.trainers.client import LeaseSession, TrainerClient
from openclaw_rl.types import WeightKind

log = structlog.get_logger()

LOCK_POLL_S = 1.0
EXIT_HUNG = 75


class TrainerConfig(BaseModel):
    """The JSON file that the server writes for its trainer."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    url: str
    """The server's base URL."""
    token: SecretStr
    data_dir: Path
    cache_dir: Path
    base_hash: str | None = None
    """Hash of the base that the engine serves; another base here is an error."""
    weights: WeightKind = WeightKind.LORA
    model: ModelSettings = ModelSettings()
    trainer: TrainerSettings = TrainerSettings()
    method: AnyMethodSettings = Field(default_factory=default_method_settings)
    log_level: str = "info"
    log_format: Literal["console", "json"] = "console"
    parent_pid: int | None = None
    """For people only; the lifeline (`openclaw_rl.processes.child_main`) ends an orphan."""

    @classmethod
    def read(cls, file: Path) -> "TrainerConfig":
        """Read the file. Raises SettingsError, which names the keys."""
        try:
            return cls.model_validate(json.loads(file.read_text()))
        except OSError as error:
            raise SettingsError(f"{file}: {error.strerror}") from error
        except ValidationError as error:
            problems = (f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors())
            raise SettingsError(f"{file}: {'; '.join(problems)}") from error
        except ValueError as error:
            raise SettingsError(f"{file}: {error}") from error


def run(config: TrainerConfig, stop: threading.Event) -> None:
    """Train until `stop`. Raises TrainerError or SettingsError when it cannot."""
    method = load_method(config.method.name)
    with _only_trainer(config.data_dir, stop) as ours:
        if not ours:
            return
        # oneDNN keeps a compiled kernel for every number of rows it has met, 1,024 by default, and batches come in all
        # sizes. This many hold the shapes of a step.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
        # torch and transformers take seconds to import: not before the lock and the config are known to be good.
        import torch
        from transformers.utils.logging import disable_progress_bar

        from openclaw_rl.models import resolve
        from openclaw_rl.trainers import base_model
        from openclaw_rl.trainers.learner import LocalLearner
        from openclaw_rl.trainers.loop import TrainerLoop

        torch.set_num_threads(config.trainer.threads)
        disable_progress_bar()  # writing a model would print one into the log
        resolved = resolve.resolve(config.model, config.cache_dir)
        base_hash = resolve.base_hash(resolved)
        if config.base_hash is not None and config.base_hash != base_hash:
            raise TrainerError(
                f"the engine serves base {config.base_hash[:12]}…, {resolved.name} here is {base_hash[:12]}…"
            )
        pictures = folder_of(DataDir.of(config.data_dir).ledger)
        policy = base_model.make_policy(config.weights, resolved, config.trainer, pictures)
        learner = LocalLearner(policy, method, config.trainer, config.method, base_hash=base_hash)
        log.info(
            "trainer_ready",
            model=resolved.name,
            method=method.name,
            weights=config.weights,
            device=config.trainer.device,
            threads=config.trainer.threads,
            trainable_parameters=sum(parameter.numel() for parameter in policy.parameters.values()),
        )
        client = TrainerClient(config.url, config.token.get_secret_value())
        try:
            name = f"local@{socket.gethostname()}"  # no pid: the ledger must know this trainer again after a restart
            # Only the end of the process ends a thread that hangs; the server starts the next process.
            session = LeaseSession(client, name, stop, on_hang=lambda: os._exit(EXIT_HUNG), log=log)
            TrainerLoop(session, learner, config.data_dir, keep_optimizers=config.trainer.keep_checkpoints).run()
        finally:
            client.close()


@contextmanager
def _only_trainer(data_dir: Path, stop: threading.Event) -> Iterator[bool]:
    """Hold the lock of the data directory; yield False if stopped while another trainer still holds it."""
    with os.fdopen(os.open(data_dir / "trainer.lock", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
        waiting = False
        while not stop.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waiting:
                    log.warning("another_trainer_runs", data_dir=str(data_dir))
                waiting = True
                stop.wait(LOCK_POLL_S)
                continue
            yield True
            return
        yield False


def step_back(nice: int) -> None:
    """Lower the priority of this process, so that chats get the cores first."""
    os.nice(nice)
    # Linux may group processes by session (autogroup). Niceness then counts within the group only, and the server
    # starts the trainer in a session of its own: so the group gets the same niceness.
    group = Path("/proc/self/autogroup")
    if os.getsid(0) != os.getpid() or not group.exists() or not group.read_text().strip():
        return  # another process's session, or a kernel that does not group (the file is absent or empty)
    for _ in range(3):
        try:
            group.write_text(f"{os.nice(0)}\n")
            return
        except OSError:  # the kernel accepts ten such changes a second from all users together
            time.sleep(0.2)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m openclaw_rl.trainers.local", description="The local trainer.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file written by the server")
    arguments = parser.parse_args(argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        config = TrainerConfig.read(arguments.config)
        configure_log(config.log_level, config.log_format, process="trainer")
        step_back(config.trainer.nice)
        run(config, stop)
    except OpenClawRLError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

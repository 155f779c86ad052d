"""What the forked processes do: the stub engine, the server as the app composes it, the trainer's loop."""

import asyncio
import importlib
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn

from kill.chats import key_of
from kill.fork_server import Role
from kill.points import Death, Fate, hook_engine, hook_server, hook_trainer
from kill.toy import KEEP_OPTIMIZERS, ToyLearner
from openclaw_rl.backoff import Backoff
from openclaw_rl.log import configure as configure_log
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.server import app
from openclaw_rl.settings import Settings
from openclaw_rl.testing import FakeEngine, ToyPolicy, stub_app
from openclaw_rl.trainers import client as trainer_client
from openclaw_rl.trainers import loop as trainer_loop

ADMIN_KEY, TRAINER_TOKEN = "admin-key", "trainer-token"
_AT_FIRST_USE = (
    "anyio._backends._asyncio",
    "httpcore",
    "openclaw_rl.methods.binary_rl",
    "pydantic.v1",
    "uvicorn.lifespan.off",
)
"""What servers and trainers import at first use, and here once for all of them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything is; the same for the whole campaign."""

    data_dir: Path
    server_port: int
    engine_port: int
    users: tuple[str, ...] = ()
    """Users with a policy each; none: one policy, and nobody has a key."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def ledger(self) -> Path:
        return self.data_dir / "ledger.sqlite3"

    def settings(self) -> Settings:
        return Settings.model_validate(
            {
                "data_dir": self.data_dir,
                "log_level": "warning",
                "server": {
                    "port": self.server_port,
                    "served_model_name": "policy",
                    "admin_key": ADMIN_KEY,
                    "trainer_token": TRAINER_TOKEN,
                    "drain_s": 5,
                    "api_keys": [{"user": user, "key": key_of(user)} for user in self.users],
                },
                # Fewer places than users: adapters leave and come back all the time.
                "policies": {"mode": "per_user", "loaded": 2} if self.users else {},
                "engine": {"kind": "url", "url": f"http://127.0.0.1:{self.engine_port}", "hold_s": 10},
                "sampling": {"max_new_tokens": 48},
                "training": {"batch_size": 8, "min_batch": 1, "max_wait_s": 0.5, "max_staleness": 8, "lease_s": 2.0},
                "trainer": {"kind": "external"},
                "publisher": {"self_test_tolerance": 0.01, "gate_replies": 4},
            }
        )


def roles(place: Place, frontend: FrontEnd, policy: ToyPolicy) -> Mapping[str, Role]:
    """By name, for the fork server. All are built before the fork; a role only runs."""
    settings, engine = place.settings(), stub_app(FakeEngine(policy=policy))
    uvicorn.Config(engine, log_config=None).load()
    ToyLearner(policy).warm_up()
    for name in _AT_FIRST_USE:
        importlib.import_module(name)

    def serve_engine(args: dict[str, Any]) -> None:
        if "report" in args:
            hook_engine(_death(args))
        listener = socket.create_server(("127.0.0.1", place.engine_port), backlog=1024)
        config = uvicorn.Config(engine, log_level="warning", access_log=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[listener])

    def serve(args: dict[str, Any]) -> None:
        hook_server(_death(args))
        asyncio.run(app.run(settings, frontend=frontend))

    def train(args: dict[str, Any]) -> None:
        death = _death(args)
        hook_trainer(death)
        configure_log("warning", process="trainer")
        torch.set_num_threads(1)
        trainer_client.COMMIT_PAUSE_S = 0.02
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        client = trainer_client.TrainerClient(place.url, TRAINER_TOKEN)
        session = trainer_client.LeaseSession(client, "toy", stop, wait_s=0.3, pauses=Backoff(0.05, 0.2))
        learner = ToyLearner(policy, death)
        trainer_loop.TrainerLoop(session, learner, place.data_dir, keep_optimizers=KEEP_OPTIMIZERS).run()
        client.close()

    return {"engine": serve_engine, "server": serve, "trainer": train}


def _death(args: dict[str, Any]) -> Death:
    fate = args.get("fate")
    return Death(None if fate is None else Fate(**fate), Path(args["report"]))

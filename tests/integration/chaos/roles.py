"""What the forked processes of the stub side do: engine, judge, server, trainer."""

import asyncio
import importlib
import json
import random
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
from kill.fork_server import Role
from kill.roles import ADMIN_KEY, TRAINER_TOKEN
from kill.toy import KEEP_OPTIMIZERS, ToyLearner
from starlette.types import ASGIApp

from chaos.faults import Rates, faulty
from chaos.memory import tell_what_is_held
from chaos.stubs import TimedEngine, stub_judge
from openclaw_rl.backoff import Backoff
from openclaw_rl.log import configure as configure_log
from openclaw_rl.proxy.frontend import FrontEnd
from openclaw_rl.server import app
from openclaw_rl.settings import MemorySettings, Settings
from openclaw_rl.testing import ToyPolicy, stub_app
from openclaw_rl.trainers import client as trainer_client
from openclaw_rl.trainers import loop as trainer_loop

_AT_FIRST_USE = (
    "anyio._backends._asyncio",
    "httpcore",
    "openclaw_rl.methods.binary_rl",
    "pydantic.v1",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.auto",
)
MAX_TOKENS = 160
KEPT = MemorySettings(texts_mb=1, words=500, ledger_mb=2, clean_texts=1000)
"""What fills to a bound does so within a minute: what grows then is a leak. The front end has it too, which is made
before the server is."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything of the stub side is."""

    folder: Path
    server_port: int
    engine_port: int
    judge_port: int
    tokens_per_s: float

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def times(self) -> Path:
        return self.folder / "engine-times"

    @property
    def held(self) -> Path:
        """What the server holds of memory, told by itself."""
        return self.folder / "held"

    @property
    def faults(self) -> Path:
        """What the stubs did, one JSON object for each life of one of them, written every second."""
        return self.folder / "faults"

    def settings(self) -> Settings:
        return Settings.model_validate(
            {
                "data_dir": self.data_dir,
                "log_format": "json",
                "server": {
                    "port": self.server_port,
                    "served_model_name": "policy",
                    "admin_key": ADMIN_KEY,
                    "trainer_token": TRAINER_TOKEN,
                    "drain_s": 10,
                },
                "engine": {"kind": "url", "url": f"http://127.0.0.1:{self.engine_port}"},
                "judge": {"kind": "llm", "url": f"http://127.0.0.1:{self.judge_port}/v1", "timeout_s": 10},
                "sampling": {"max_new_tokens": MAX_TOKENS},
                "training": {"batch_size": 16, "min_batch": 1, "max_wait_s": 3, "max_staleness": 8, "lease_s": 5},
                "trainer": {"kind": "external"},
                "publisher": {"self_test_tolerance": 0.01, "gate_replies": 4},
                "memory": KEPT,
                "sessions": {"max_open_turns": 100},
            }
        )


def roles(place: Place, frontend: FrontEnd, policy: ToyPolicy) -> Mapping[str, Role]:
    """By name, for the fork server."""
    settings = place.settings()
    ToyLearner(policy).warm_up()
    for name in _AT_FIRST_USE:
        importlib.import_module(name)

    def serve_engine(args: dict[str, Any]) -> None:
        chance = random.Random(args["seed"])
        engine = TimedEngine(policy, tokens_per_s=place.tokens_per_s, times=place.times, chance=chance)
        _serve(stub_app(engine), place.engine_port, args, chance, place.faults)

    def serve_judge(args: dict[str, Any]) -> None:
        chance = random.Random(args["seed"])
        judge = stub_judge(chance, garbage=0.1 if args["is_faulty"] else 0.0)
        _serve(judge, place.judge_port, args, chance, place.faults)

    def serve(_: dict[str, Any]) -> None:
        place.held.unlink(missing_ok=True)  # its predecessor's
        threading.Thread(target=tell_what_is_held, args=(place.held, 5.0), daemon=True).start()
        asyncio.run(app.run(settings, frontend=frontend))

    def train(_: dict[str, Any]) -> None:
        configure_log("warning", process="trainer")
        torch.set_num_threads(1)
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        client = trainer_client.TrainerClient(f"http://127.0.0.1:{place.server_port}", TRAINER_TOKEN)
        session = trainer_client.LeaseSession(client, "toy", stop, pauses=Backoff(1.0, 2.0))
        trainer_loop.TrainerLoop(session, ToyLearner(policy), place.data_dir, keep_optimizers=KEEP_OPTIMIZERS).run()
        client.close()

    return {"engine": serve_engine, "judge": serve_judge, "server": serve, "trainer": train}


def _serve(app: ASGIApp, port: int, args: Mapping[str, Any], chance: random.Random, faults: Path) -> None:
    counts: Counter[str] = Counter()
    served = faulty(app, Rates(), chance, counts) if args["is_faulty"] else app
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    # A reset in the middle of an answer is what we do; uvicorn's tracebacks of it say nothing.
    config = uvicorn.Config(served, log_level="critical", access_log=False, lifespan="off")

    async def run() -> None:
        server = asyncio.ensure_future(uvicorn.Server(config).serve(sockets=[listener]))
        while not server.done():
            await asyncio.wait((server,), timeout=1)
            (faults / f"{args['name']}-{args['seed']}.json").write_text(json.dumps(counts))

    asyncio.run(run())
    sys.exit(0)

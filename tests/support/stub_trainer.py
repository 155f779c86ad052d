"""The local trainer's process without a model: the real config, loop, client and checkpoints, over a learner that fails
in the way that the file `trainer.how` in the data directory says.

    exit 3     the process ends with this status as soon as it starts
    hold       the step goes on until nothing is said any more, and every step until then
    full       no checkpoint can be written: the disk is full
    no step    no step can be made of the batch
"""

import argparse
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from openclaw_rl.backoff import Backoff
from openclaw_rl.log import configure as configure_log
from openclaw_rl.testing import ToyPolicy
from openclaw_rl.testing.toy_policy import BASE_SEED
from openclaw_rl.trainer_protocol import Probe
from openclaw_rl.trainers.base import NoStep, Step
from openclaw_rl.trainers.client import LeaseSession, TrainerClient
from openclaw_rl.trainers.local import TrainerConfig
from openclaw_rl.trainers.loop import TrainerLoop
from openclaw_rl.types import Sample, WeightKind

WEIGHTS_FILE = "adapter_model.safetensors"
HELD = "trainer.held"
"""The process whose step holds."""


class StubLearner:
    kind = WeightKind.LORA
    base_hash = "stub"

    def __init__(self, data_dir: Path) -> None:
        self._data_dir, self._weights = data_dir, b""

    @property
    def how(self) -> str:
        file = self._data_dir / "trainer.how"
        return file.read_text() if file.exists() else ""

    def load(self, folder: Path | None, *, fresh_moments: bool) -> None:
        self._weights = b"" if folder is None else (folder / WEIGHTS_FILE).read_bytes()

    def step(self, samples: Sequence[Sample], between: Callable[[], None], parent: int | None = None) -> Step | NoStep:
        if self.how == "no step":
            return NoStep("the gradient is not finite")
        if self.how == "hold":
            (self._data_dir / HELD).write_text(str(os.getpid()))
            while self.how:
                between()
                time.sleep(0.02)
        self._weights = hashlib.sha256(self._weights + repr([s.sample_id for s in samples]).encode()).digest() * 4
        seed = int.from_bytes(hashlib.sha256(self._weights).digest()[:8], "big")
        first = samples[0]
        ids, start = (*first.prompt_ids, *first.response_ids), len(first.prompt_ids)
        probe = Probe(
            prompt_ids=list(first.prompt_ids),
            response_ids=list(first.response_ids),
            log_probs=list(ToyPolicy().log_probs(ids, start, seed)),
            parent_log_probs=list(ToyPolicy().log_probs(ids, start, BASE_SEED)),
        )
        return Step({"samples": float(len(samples))}, probes=(probe,))

    def write(self, folder: Path) -> str:
        if self.how == "full":
            raise OSError(28, "No space left on device")
        (folder / WEIGHTS_FILE).write_bytes(self._weights)
        return WEIGHTS_FILE


def shim(file: Path) -> Path:
    """An interpreter, as far as the server can tell, that runs this module in the place of the local trainer."""
    paths = ":".join(path for path in sys.path if path)
    file.write_text(
        f'#!/bin/sh\n[ "$2" = openclaw_rl.processes.child_main ] && [ "$3" = openclaw_rl.trainers.local ] || exit 99\n'
        f'PYTHONPATH={paths} exec {sys.executable} -m openclaw_rl.processes.child_main stub_trainer --config "$5"\n'
    )
    file.chmod(0o700)
    return file


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    config = TrainerConfig.read(parser.parse_args().config)
    learner = StubLearner(config.data_dir)
    if learner.how.startswith("exit "):
        return int(learner.how.split()[1])
    configure_log("info", "console", process="trainer")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    client = TrainerClient(config.url, config.token.get_secret_value())
    name = f"local@{socket.gethostname()}"
    session = LeaseSession(client, name, stop, wait_s=0.5, pauses=Backoff(0.05, 0.2))
    TrainerLoop(session, learner, config.data_dir).run()
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

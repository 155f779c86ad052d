"""A toy server and a toy driver as processes of the real launcher: `python -m toy_processes KIND FOLDER`.

The server is killed once the driver has a checkpoint on disk that it did not report. It ends when the driver that was
started again has begun.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from toy_node import TOKEN, ToyServer

from openclaw_rl.trainer_protocol import Commit, Manifest, Report
from openclaw_rl.trainers.client import LeaseSession, ServerGone, TrainerClient
from openclaw_rl.types import WeightKind
from openclaw_slime.checkpoints import Checkpoints
from openclaw_slime.node import TRAINER

START_AGAIN = 75


def server(folder: Path) -> int:
    is_first = not (folder / "checkpointed").exists()
    toy = ToyServer(folder)
    if is_first:
        for _ in range(2):
            toy.do(toy.sample(0))
    for place, text in (("run/server.json", json.dumps({"url": toy.url})), ("keys/trainer.token", TOKEN)):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(text)
    _wait(folder / ("checkpointed" if is_first else "started_again"))
    if is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    found = {
        "versions": [[v.weight_version, str(v.state), v.durable] for v in toy.do(toy.ledger.versions())],
        "turns": [[str(turn.state), turn.trained_in] for turn in toy.do(toy.ledger.turns())],
        "audit": toy.do(toy.ledger.audit()),
    }
    (folder / "found.json").write_text(json.dumps(found))
    toy.close()
    return 0


def driver(folder: Path) -> int:
    url = json.loads((folder / "run" / "server.json").read_text())["url"]
    client, checkpoints = TrainerClient(url, TOKEN), Checkpoints(folder)
    started = client.start(TRAINER, checkpoints.whole_fences())
    if (folder / "checkpointed").exists():
        (folder / "started_again").write_text(started.tip.model_dump_json())
        _wait(folder / "never")
    lease = LeaseSession(client, TRAINER, threading.Event()).take()
    assert lease is not None
    export = checkpoints.folder(lease.fence)
    manifest = Manifest(folder=export, kind=WeightKind.FULL, base_hash="base", sha256="", weights_file="weights.json")
    report = Report(metrics={})
    taken = {"lease_id": lease.lease_id, "fence": lease.fence, "parent": lease.parent}
    version = client.commit(Commit(**taken, manifest=manifest, report=report, durable=False))
    for place in (checkpoints.megatron / f"iter_{lease.fence:07d}", folder / export):
        place.mkdir(parents=True)
        (place / "weights.json").write_text(json.dumps([sample.sample_id for sample in lease.samples]))
    checkpoints.seal(lease.fence)
    (folder / "checkpointed").touch()
    try:
        while True:
            time.sleep(0.05)
            client.tip()
    except ServerGone as error:
        sys.stderr.write(f"version {version} is on disk, and was not reported: {error}\n")
        return START_AGAIN


def _wait(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    kinds: dict[str, Callable[[Path], int]] = {"server": server, "driver": driver}
    sys.exit(kinds[sys.argv[1]](Path(sys.argv[2])))
